"""Without the package that reads addresses."""

import subprocess
import sys

CODE = """
import sys
sys.modules["obstore"] = None  # as if it were not installed
import dualform
try:
    dualform.open("s3://bucket/run")
except dualform.errors.StoreError as error:
    print(error)
"""


def test_the_message_names_the_extra():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert "need the package obstore, which is not installed: pip install 'dualform[remote]'" in found
