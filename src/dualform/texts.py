"""The texts of the paper: found on this machine, or downloaded and checked.

A text is looked for where images are (`dualform.data`): in the folder that the user names, in `DUALFORM_DATA`, in the user's
cache; else it is downloaded into the cache. What is used of it is checked by its sha256, with LF line ends.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dualform.data import cache, known_places
from dualform.errors import DataError


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
    places = list(known_places(name, folder))
    found = {}
    for file in SOURCES[name].sums:
        path = next((place / file for place in places if (place / file).is_file()), None)
        if path is None:
            return _downloaded(name, places)
        text = _checked(name, file, _read(path))
        if text is None:
            raise DataError(
                f"{path} is not {name}'s {file}: the sha256 of its text is another one. Remove it, and it is looked for "
                f"elsewhere."
            )
        found[file] = text
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from None


def _checked(name: str, file: str, content: bytes) -> str | None:
    source = SOURCES[name]
    text = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if source.used is not None:
        part = source.used.search(text)
        text = part.group() if part else ""
    return text if hashlib.sha256(text.encode()).hexdigest() == source.sums[file] else None


def _downloaded(name: str, places: list[Path]) -> dict[str, str]:
    import pooch

    source, target, problems = SOURCES[name], cache() / name, []
    for address in source.addresses:
        short = address.rsplit("/", 1)[-1]
        try:
            path = Path(pooch.retrieve(address, None, f"download-{short}", target, progressbar=False))
        except Exception as error:  # whatever the network does
            problems.append(f"{address}: {error}")
            continue
        try:
            members = _members(path, list(source.sums))
            texts = {file: _checked(name, file, members(file)) for file in source.sums}
        except (OSError, KeyError, zipfile.BadZipFile) as error:  # cut short, or a page that says no
            texts, problem = {}, str(error)
        else:
            problem = "the sha256 of its text is another one"
        path.unlink(missing_ok=True)
        if texts and all(text is not None for text in texts.values()):
            kept = {file: text for file, text in texts.items() if text is not None}
            for file, text in kept.items():
                (target / file).write_text(text if source.used is None else f"{text}\n*** END\n", newline="\n")
            return kept
        problems.append(f"{address}: {problem}")
    raise DataError(
        f"{name}: no {', '.join(source.sums)} in {', '.join(map(str, places))}, and no download ({'; '.join(problems)}). Put "
        f"the files into a folder {name}/ and name the folder above it with --data or DUALFORM_DATA."
    )


def _members(path: Path, wanted: list[str]) -> Callable[[str], bytes]:
    """The files of a download: of an archive by the end of their names, else the download itself."""
    if not path.name.endswith(".zip"):
        return lambda file: path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        names = {Path(name).name: name for name in archive.namelist()}
        found = {file: archive.read(names[file]) for file in wanted}
    return lambda file: found[file]
