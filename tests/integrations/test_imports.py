"""The frameworks are optional: nothing of dualform imports them but the integration of each."""

import subprocess
import sys

CHECK = """
import sys
import dualform, dualform.integrations, dualform.cli
dualform.record, dualform.open
loaded = {"transformers", "trl", "peft", "accelerate", "datasets", "lightning"} & set(sys.modules)
assert not loaded, loaded
"""


def test_no_framework_is_imported():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
