"""The README's example is run as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks, "the README has no python block"
    (tmp_path / "example.py").write_text(blocks[0])
    answer = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "fail" not in answer.stdout
    assert answer.stdout.count("pass: within 4 rounding floors") == 4
    assert (tmp_path / "runs" / "digits" / "manifest.json").exists()


def test_every_picture_and_file_it_names_exists():
    named = re.findall(r"\]\(((?!http)[^)#]+)\)", README.read_text())
    assert named
    assert [name for name in named if not (README.parent / name).exists()] == []
