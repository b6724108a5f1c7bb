"""The example of docs/evaluating.md is run as it stands, with fewer trainings."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "evaluating.md"


def test_the_example_runs(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    fewer = block.replace("subsets=50, repeats=2", 'subsets=6, repeats=1, views=["attention", "whitened"]')
    assert fewer != block
    (tmp_path / "mine.py").write_text(fewer)
    answer = subprocess.run(
        [sys.executable, "-W", "error", "mine.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "whitened" in answer.stdout


def test_every_file_it_names_exists():
    for document in (DOCUMENT, DOCUMENT.with_name("quality.md")):
        named = re.findall(r"\]\(((?!http)[^)#]+)\)", document.read_text())
        assert [name for name in named if not (document.parent / name).exists()] == []
