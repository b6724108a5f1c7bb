"""Datasets on this machine, or downloaded into the user's cache.

A dataset is a folder with its name: in the folder that the user gives, in `DUALFORM_DATA`, or in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dualform.errors import DataError

T = TypeVar("T")


def cache() -> Path:
    """The user's cache."""
    import pooch

    return Path(pooch.os_cache("dualform"))


def known_places(name: str, folder: Path | None) -> list[Path]:
    """Where a dataset is looked for, in this order: the given folder, DUALFORM_DATA, the cache."""
    roots = [] if folder is None else [folder]
    if os.environ.get("DUALFORM_DATA"):
        roots.append(Path(os.environ["DUALFORM_DATA"]))
    return [root / name for root in (*roots, cache())]


def download(name: str, addresses: Sequence[str], read: Callable[[Path], T]) -> T:
    """Download a file of a dataset into the cache, from the first address where `read` accepts it; return what `read` gives.

    read: raises an OSError for a file that is not the right one, which is then removed. Raises a DataError that lists what went
    wrong at each address.
    """
    import pooch

    problems = []
    for address in addresses:
        path = cache() / name / address.rsplit("/", 1)[-1]
        try:
            pooch.retrieve(address, None, path.name, path.parent, progressbar=False)
            return read(path)
        except Exception as error:  # the network, a truncated file, an error page in its place
            path.unlink(missing_ok=True)
            problems.append(f"{address}: {error}")
    raise DataError("; ".join(problems))


def missing(name: str, files: str, places: Sequence[Path], download_error: DataError, hint: str = "") -> DataError:
    """The error for files that are neither on this machine nor on the web. hint: another way to get them."""
    looked = ", ".join(map(str, places))
    return DataError(
        f"{name}: no {files} in {looked}, and no download ({download_error}). Put the dataset's files into a folder {name}/ "
        f"and name the folder above it with --data or DUALFORM_DATA.{hint}"
    )
