"""The example of docs/language.md for a text of your own runs as it stands."""

import re
from pathlib import Path

from story import STORY


def test_a_text_of_your_own(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "language.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "book.txt" in code)
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Once upon a time there was a wolf.\n" * 4 + STORY * 4, encoding="utf-8")
    exec(code.replace("steps=300", "steps=2"), {})
    printed = capsys.readouterr().out
    assert "nats per token" in printed
    assert printed.count("Passage(position=") == 3
