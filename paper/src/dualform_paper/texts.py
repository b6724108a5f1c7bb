"""The texts of the paper: found on this machine, or downloaded and checked.

A text is looked for where images are (`downloads.py`), else it is downloaded into the cache. What is used of it is checked by
its sha256, with LF line ends.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dualform.errors import DataError
from dualform_paper.downloads import cache, download, known_places, missing


@dataclass(frozen=True)
class Source:
    """Where a text comes from, and what its files hold."""

    title: str
    addresses: tuple[str, ...]
    """Of the one file, or of an archive (.zip) that holds all files; tried in this order."""
    sums: dict[str, str]
    """By file: sha256 of what is used of it."""
    used: re.Pattern[str] | None = None
    """What is used of a file; default: all of it."""


SOURCES = {
    "aesop": Source(
        "Aesop's Fables",
        ("https://www.gutenberg.org/files/49010/49010-0.txt", "https://www.gutenberg.org/cache/epub/49010/pg49010.txt"),
        {"49010-0.txt": "32f21a8ef0977dc9743843da14363ab933c269ce0cfb3422bf244e93f6511cfe"},
        # From the first fable to the end of the book; what Project Gutenberg says around it changes with its editions
        re.compile(
            r"^THE WOLF AND THE LAMB\n.*?(?=\s*^(?:End of (?:the )?Project Gutenberg|\*\*\* ?END))", re.S | re.M
        ),
    ),
    "wikitext-2": Source(
        "WikiText-2",
        (
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
        ),
        {
            "wiki.train.tokens": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
}


def files(name: str, folder: Path | None = None) -> dict[str, str]:
    """What is used of each file of "aesop" or "wikitext-2"."""
    if name not in SOURCES:
        raise DataError(f"there is no text {name!r}; known are {', '.join(map(repr, SOURCES))}.")
    source = SOURCES[name]
    places = known_places(name, folder)
    paths = {file: _find(places, file) for file in source.sums}
    if all(paths.values()):
        return {file: _checked(name, file, _read(path), path) for file, path in paths.items() if path is not None}
    try:
        texts = download(name, source.addresses, lambda path: _unpacked(name, path))
    except DataError as error:
        raise missing(name, ", ".join(source.sums), places, error) from None
    _keep(name, texts)
    return texts


def _find(places: Sequence[Path], file: str) -> Path | None:
    return next((place / file for place in places if (place / file).is_file()), None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from None


def _checked(name: str, file: str, content: bytes, path: Path) -> str:
    """What is used of a file, whose sha256 is checked. path: where it was found, for the message."""
    source = SOURCES[name]
    text = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if source.used is not None:
        part = source.used.search(text)
        text = part.group() if part else ""
    if hashlib.sha256(text.encode()).hexdigest() != source.sums[file]:
        raise DataError(
            f"{path} is not {name}'s {file}: the sha256 of its text is another one. Remove it, and it is looked for elsewhere."
        )
    return text


def _unpacked(name: str, path: Path) -> dict[str, str]:
    """The texts in a download: an archive that holds all files, or the one file itself."""
    expected = SOURCES[name].sums
    if path.suffix != ".zip":
        (file,) = expected
        return {file: _checked(name, file, path.read_bytes(), path)}
    with zipfile.ZipFile(path) as archive:
        members = {Path(member).name: member for member in archive.namelist()}
        lacking = [file for file in expected if file not in members]
        if lacking:
            raise DataError(f"{path} has no {', '.join(lacking)}.")
        return {file: _checked(name, file, archive.read(members[file]), path) for file in expected}


def _keep(name: str, texts: dict[str, str]) -> None:
    """Leave only the files that are used in the cache."""
    source = SOURCES[name]
    folder = cache() / name
    for address in source.addresses:
        (folder / address.rsplit("/", 1)[-1]).unlink(missing_ok=True)
    for file, text in texts.items():
        content = text if source.used is None else f"{text}\n*** END\n"
        (folder / file).write_text(content, encoding="utf-8", newline="\n")
