"""Puts the files of a recording at an address."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import obstore

from dualform.errors import StoreError, StoreMissingError
from dualform.store.copying import download
from dualform.store.files import Files, LocalFiles, address, reading
from dualform.store.remote import RemoteFiles, asking

PART = 8 << 20
"""Larger files are sent in parts of this size, …"""
PARTS_AT_A_TIME = 4
"""… this many of each file at a time."""

T = TypeVar("T")


class AddressTarget:
    """Puts files at an address; each is there as a whole or not at all, as object storage has it."""

    def __init__(self, location: str):
        self.files = RemoteFiles(location)
        if not self.files.has_lists:
            raise StoreError(
                f"{location} can only be read: web servers take no files. Copy to s3://, gs:// or az://, or into a folder."
            )

    def put(self, source: Files, name: str, check: Callable[[Files, str], None]) -> None:
        """Copy a file. check: raises an error if it is not as it should be."""
        with _local_file(source, name, check) as path:
            self._write(
                name,
                lambda: obstore.put(self.files.objects, name, path, chunk_size=PART, max_concurrency=PARTS_AT_A_TIME),
            )

    def put_bytes(self, name: str, content: bytes) -> None:
        """Write a file of this content."""
        self._write(name, lambda: obstore.put(self.files.objects, name, content))

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with contextlib.suppress(StoreMissingError):
            self._write(name, lambda: obstore.delete(self.files.objects, name))

    def release(self, *, is_whole: bool) -> None:
        """Do nothing: nothing is locked."""

    def _write(self, name: str, ask: Callable[[], T]) -> None:
        asking(address(self.files, name), ask, partial(self._missing, name), what="written")

    def _missing(self, name: str, error: BaseException) -> StoreError:
        return StoreMissingError(f"{address(self.files, name)} cannot be written: {error}.")


@contextlib.contextmanager
def _local_file(source: Files, name: str, check: Callable[[Files, str], None]) -> Iterator[Path]:
    """Give the path of a file that is known to be whole, on this machine."""
    if isinstance(source, LocalFiles):
        check(source, name)
        with reading(source.path(name)):
            yield source.path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, Path(name).name)
        download(source, name, path, check)
        yield path
