"""The image datasets of the paper: found on this machine, or downloaded and checked.

A dataset is looked for in the folder that the user names, else in `DUALFORM_DATA`, else in the user's cache, else where Debian's
package puts it, else it is downloaded into the cache. What is read is checked by the sha256 of its uncompressed content.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualform.errors import DataError

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
FILES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("test", "images"): "t10k-images-idx3-ubyte",
    ("test", "labels"): "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from, and what its files hold."""

    title: str
    addresses: tuple[str, ...]
    """Folders on the web, tried in this order."""
    package: str | None
    """Where a package of the system puts it."""
    sums: tuple[str, str, str, str]
    """sha256 of the uncompressed files, in the order of FILES."""
    classes: tuple[str, ...]


SOURCES = {
    "mnist": Source(
        "MNIST",
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        None,
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        tuple("0123456789"),
    ),
    "fashion-mnist": Source(
        "Fashion-MNIST",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        "/usr/share/datasets/fashion-mnist",
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
}


@dataclass(frozen=True)
class Images:
    """Half of a dataset: pixels (n, 28, 28) from 0 to 255, labels (n,)."""

    name: str
    part: str
    pixels: Pixels
    labels: np.ndarray[Any, np.dtype[np.int64]]


def images(name: str, part: str, folder: Path | None = None) -> Images:
    """The "train" or "test" images of "mnist" or "fashion-mnist"."""
    if name not in SOURCES:
        raise DataError(f"there is no dataset {name!r}; known are {', '.join(map(repr, SOURCES))}.")
    pixels = np.frombuffer(_content(name, (part, "images"), folder), np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer(_content(name, (part, "labels"), folder), np.uint8, offset=8).astype(np.int64)
    return Images(name, part, pixels, labels)


def cache() -> Path:
    """The user's cache."""
    import pooch

    return Path(pooch.os_cache("dualform"))


def _content(name: str, which: tuple[str, str], folder: Path | None) -> bytes:
    file, expected = FILES[which], SOURCES[name].sums[list(FILES).index(which)]
    package = SOURCES[name].package
    places = [*known_places(name, folder), *([Path(package)] if package else [])]
    for path in (place / f"{file}{ending}" for place in places for ending in (".gz", "")):
        if path.is_file():
            content = _checked(path, expected)
            if content is None:
                raise DataError(
                    f"{path} is not {name}'s {file}: the sha256 of its content is another one. Remove it, and it is "
                    f"looked for elsewhere."
                )
            return content
    return _downloaded(name, file, expected, places)


def known_places(name: str, folder: Path | None) -> Iterator[Path]:
    """Where a dataset is looked for: in the named folder, in DUALFORM_DATA, in the cache."""
    if folder is not None:
        yield folder / name
    if os.environ.get("DUALFORM_DATA"):
        yield Path(os.environ["DUALFORM_DATA"]) / name
    yield cache() / name


def _checked(path: Path, expected: str) -> bytes | None:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
    return content if hashlib.sha256(content).hexdigest() == expected else None


def _downloaded(name: str, file: str, expected: str, places: list[Path]) -> bytes:
    import pooch

    problems = []
    for address in SOURCES[name].addresses:
        try:
            path = Path(pooch.retrieve(f"{address}{file}.gz", None, f"{file}.gz", cache() / name, progressbar=False))
        except Exception as error:  # whatever the network does
            problems.append(f"{address}: {error}")
            continue
        try:
            content, problem = _checked(path, expected), "the content's sha256 is another one"
        except DataError as error:  # cut short, or a page that says no
            content, problem = None, str(error)
        if content is not None:
            return content
        path.unlink(missing_ok=True)
        problems.append(f"{address}: {problem}")
    looked = ", ".join(str(place) for place in places)
    package = SOURCES[name].package
    debian = f" Debian: apt install {'dataset-' + name}." if package else ""
    raise DataError(
        f"{name}: no {file}.gz in {looked}, and no download ({'; '.join(problems)}). Put the dataset's four .gz files into a "
        f"folder {name}/ and name the folder above it with --data or DUALFORM_DATA.{debian}"
    )
