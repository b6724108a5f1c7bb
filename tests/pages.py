"""Code in documents: it runs as it stands, and prints what the document says."""

import contextlib
import io
import re
from pathlib import Path

BOX = re.compile(r"[─━═┌┬┐│┆╞╪╡└┴┘]+")
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)
ROUNDING = 1e-4
"""Numbers below it are differences by rounding, whose digits depend on the machine."""


def code_blocks(page: Path) -> list[str]:
    """The python blocks of a page."""
    return [content for language, content in BLOCK.findall(page.read_text()) if language == "python"]


def run_page(page: Path) -> dict[str, object]:
    """Run the python blocks of a page one after the other, and compare what they print with the text blocks between them."""
    names: dict[str, object] = {}
    printed = ""
    for language, content in BLOCK.findall(page.read_text()):
        if language == "text":
            compare(printed, content)
            printed = ""
        elif ".explore(" not in content:  # opens a page and waits
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(content, names)
            printed += stream.getvalue()
    return names


def compare(printed: str, expected: str) -> None:
    """The same words, and the same numbers to a thousandth."""
    found = BOX.sub(" ", printed).split()
    wanted = BOX.sub(" ", expected).split()
    assert len(found) == len(wanted), f"printed:\n{printed}\nexpected:\n{expected}"
    for one, other in zip(found, wanted, strict=True):
        assert is_same(one, other), f"{one} is not {other}; printed:\n{printed}"


def is_same(one: str, other: str) -> bool:
    """Whether two words are equal, or numbers that differ by rounding."""
    try:
        first = float(one)
        second = float(other)
    except ValueError:
        return one == other
    largest = max(abs(first), abs(second))
    return largest < ROUNDING or abs(first - second) <= 1e-3 * largest
