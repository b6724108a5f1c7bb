"""A folder of bounded size that keeps what was read from elsewhere; several processes may share it.

Each part of a file is a file of its own, with a checksum at its end. It is written under another name and renamed, so that nobody
sees half of one, and it is removed as a whole: whoever has it mapped keeps its bytes. A part that is damaged is as good as none.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, get_ident

import numpy as np
import xxhash

from dualform.arrays import Bytes
from dualform.errors import StoreError
from dualform.store.files import LocalFiles

FOLDER = "DUALFORM_CACHE"
"""The environment variable that names the folder."""
SIZE = "DUALFORM_CACHE_SIZE"
"""The one that says how large it may become: 500MB, 20GB, or a number of bytes."""
PARTS, MADE = "parts", "made"
"""The folders within: parts of files, and files that were made from a store elsewhere."""
DEFAULT_SIZE = 10_000_000_000
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
LOOK_AGAIN = 32
"""The folder is measured again when this process has written a 32nd of the bound: others may have written as well."""
KEPT = 0.9
"""When the bound is passed, parts are removed until this much of it is left in use."""
DIGEST = 8
"""Bytes of the checksum at the end of a part."""
ABANDONED = 3600
"""Unfinished files this many seconds old belong to processes that were killed."""


class Cache:
    """Parts of files, by name, in a folder of bounded size. The least recently used are removed first."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, most_bytes: int | None = None):
        """Default: what the environment says (DUALFORM_CACHE, DUALFORM_CACHE_SIZE)."""
        self.folder = cache_folder() if folder is None else Path(folder)
        self.most_bytes = _size_setting() if most_bytes is None else most_bytes
        self._parts = LocalFiles(self.folder / PARTS)
        self._lock = Lock()
        self._nbytes = self.most_bytes
        """How large the folder may be by now; too large at first, so that the first write measures it."""
        self._warned = False

    def get(self, name: str) -> Bytes | None:
        """Return a part, mapped into memory; None if it is not there, or damaged."""
        path = self._parts.path(name)
        try:
            os.utime(path)  # when it was last used
            content = self._parts.map(name)
        except (OSError, ValueError):  # ValueError: an empty file
            return None
        part = content[:-DIGEST]
        if len(content) < DIGEST or content[-DIGEST:].tobytes() != _digest(part):
            self.remove(name)
            return None
        return part

    def put(self, name: str, part: Bytes) -> Bytes:
        """Keep a part; returns it, mapped if that was possible."""
        if len(part) > self.most_bytes:
            return part
        try:
            self._write(name, part)
        except OSError as error:
            self._warn(error)
            return part
        kept = self.get(name)
        return part if kept is None else kept

    def remove(self, name: str) -> None:
        """Remove a part, if it is there."""
        with contextlib.suppress(OSError):
            self._parts.remove(name)

    def remove_all(self, beginning: str) -> None:
        """Remove the parts whose names begin so."""
        with contextlib.suppress(OSError):
            for name in self._parts.list():
                if name.startswith(beginning):
                    self.remove(name)

    def folder_for(self, name: str) -> LocalFiles:
        """Return a folder for files that are made from a store elsewhere; they count, and are removed like parts."""
        folder = self.folder / MADE / name
        with contextlib.suppress(OSError):
            _make_private(folder)
        return LocalFiles(folder)

    def _write(self, name: str, part: Bytes) -> None:
        path = self._parts.path(name)
        _make_private(path.parent)
        self._make_room(len(part) + DIGEST)
        unfinished = path.with_name(f".{name}.{os.getpid()}.{get_ident()}")
        try:
            with open(unfinished, "xb") as file:
                file.write(part.data)
                file.write(_digest(part))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            if self._nbytes <= self.most_bytes:
                return
            files = sorted(self._files())
            left = nbytes + sum(size for _, size, _ in files)
            if left > self.most_bytes:
                left = _remove_oldest(files, left, int(KEPT * self.most_bytes))
            self._nbytes = max(left, self.most_bytes - self.most_bytes // LOOK_AGAIN)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield all files in the folder: when each was last used, its size, its path."""
        for kind in (PARTS, MADE):
            for path in (self.folder / kind).rglob("*"):
                with contextlib.suppress(OSError):  # another process may have removed it
                    status = path.lstat()
                    is_unfinished = path.name.startswith(".") and time.time() - status.st_mtime < ABANDONED
                    if stat.S_ISREG(status.st_mode) and not is_unfinished:
                        yield status.st_mtime, status.st_size, path

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            reason = error.strerror or error
            warnings.warn(
                f"{self.folder} cannot be written ({reason}), so what is read from elsewhere is not kept. Name another folder by {FOLDER}.",
                stacklevel=2,
            )


def _make_private(folder: Path) -> None:
    """Make a folder and those above it, which nobody else may read."""
    for path in reversed([folder, *folder.parents]):
        if not path.exists():
            path.mkdir(exist_ok=True, mode=0o700)


def cache_folder() -> Path:
    """Return the folder that the environment names, or the usual one."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dualform"


def _size_setting() -> int:
    text = os.environ.get(SIZE, "").strip()
    if not text:
        return DEFAULT_SIZE
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", text.upper())
    if found is None or found[2] not in UNITS:
        raise StoreError(f'{SIZE}={text!r}: expected a size such as "500MB" or "20GB".')
    return int(float(found[1]) * UNITS[found[2]])


def _remove_oldest(files: list[tuple[float, int, Path]], nbytes: int, wanted: int) -> int:
    """Remove files, which are sorted by their age, until only `wanted` bytes are left; returns how many are."""
    for _, size, path in files:
        if nbytes <= wanted:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            nbytes -= size
    return nbytes


def _digest(part: Bytes) -> bytes:
    return xxhash.xxh3_64_digest(np.ascontiguousarray(part).data)
