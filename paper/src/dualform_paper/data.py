"""The image datasets of the paper: found on this machine, or downloaded and checked.

A dataset is looked for in the folder that the user names, else in `DUALFORM_DATA`, else in the user's cache, else where Debian's
package puts it, else it is downloaded into the cache. What is read is checked by the sha256 of its uncompressed content.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualform.errors import DataError
from dualform_paper.downloads import download, known_places, missing

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


def _content(name: str, which: tuple[str, str], folder: Path | None) -> bytes:
    """The uncompressed content of a file."""
    source = SOURCES[name]
    file = FILES[which]
    expected = source.sums[list(FILES).index(which)]
    places = known_places(name, folder)
    if source.package:
        places.append(Path(source.package))
    for path in (place / f"{file}{ending}" for place in places for ending in (".gz", "")):
        if path.is_file():
            return _read(path, expected, name)
    try:
        addresses = [f"{address}{file}.gz" for address in source.addresses]
        return download(name, addresses, lambda path: _read(path, expected, name))
    except DataError as error:
        debian = f" Debian: apt install dataset-{name}." if source.package else ""
        raise missing(name, f"{file}.gz", places, error, debian) from None


def _read(path: Path, expected: str, name: str) -> bytes:
    """The uncompressed content of a file, whose sha256 is checked."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
    if hashlib.sha256(content).hexdigest() != expected:
        file = path.name.removesuffix(".gz")
        raise DataError(
            f"{path} is not {name}'s {file}: the sha256 of its content is another one. Remove it, and it is looked for elsewhere."
        )
    return content
