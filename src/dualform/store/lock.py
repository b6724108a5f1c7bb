"""Who may write a store's folder: one writer at a time, never a forked child of it, and only a recording is overwritten.

`flock` belongs to the open file, which a forked child shares with its parent (a DataLoader worker, for example). So the lock is
released explicitly and not by closing the file, and a child closes its copy right after the fork: otherwise it would keep the folder
locked after its parent was killed.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import BinaryIO

from dualform.errors import StoreDamagedError, StoreError, StoreExistsError
from dualform.store.files import WritableFiles, folder_at, reading, writing
from dualform.store.format import LOCK, MANIFEST, read_manifest
from dualform.store.samples import SAMPLES
from dualform.store.shards import RUN, SHARD_NAME, is_run, read_run

try:
    import fcntl
except ImportError:  # Windows: the second writer is then found by the folder's content alone
    fcntl = None  # type: ignore[assignment]


FORMATS = {MANIFEST: b'"format": "dualform"', RUN: b'"format": "dualform run"'}
"""By file: what a recording of one process, or of several ranks, has in it."""


class FolderLock:
    """Holds a folder against other writers until it is released, or until the process ends."""

    def __init__(self, files: WritableFiles):
        self._file: BinaryIO | None = None
        with writing(files.location):
            file = files.open_lock(LOCK)
        if fcntl is None:
            file.close()
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = file
            _HELD.add(self)
        except OSError:
            file.close()
            raise StoreExistsError(
                f"{files.location} is being written by another recorder (it holds {LOCK}). Record into another folder, or wait."
            ) from None
        except BaseException:
            file.close()
            raise

    def release(self) -> None:
        """Let others write the folder. Does nothing the second time, and nothing in a forked child."""
        _HELD.discard(self)
        file, self._file = self._file, None
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is None:
            return
        # Something went wrong before its owner could release it
        try:  # noqa: SIM105 (contextlib may be gone when the interpreter ends)
            self.release()
        except Exception:
            pass

    def _forget(self) -> None:
        """Close a child's copy of the file: the lock stays with the parent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()
"""The locks that this process holds."""


def _forget_locks() -> None:
    for lock in _HELD:
        lock._forget()
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def locked(files: WritableFiles) -> Iterator[None]:
    """Hold a store against other writers; it must exist."""
    if is_run(files):
        read_run(files)
    else:
        read_manifest(files)
    lock = FolderLock(files)
    try:
        yield
    finally:
        lock.release()


def prepare(files: WritableFiles, *, overwrite: bool) -> None:
    """Make room for a new store, or say why not. Only a recording is ever overwritten."""
    location = files.location
    try:
        with reading(location):
            names = files.list()
    except StoreError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            raise StoreExistsError(
                f"{location} is a file, or within one; a recording is a folder. Choose another path."
            ) from None
        raise
    if not names:
        return
    shards = [folder_at(f"{location}/{name}") for name in names if SHARD_NAME.fullmatch(name)]
    has_manifest = MANIFEST in names or RUN in names
    # Without a manifest there are at most the leftovers of a recording that was killed before its first one
    is_ours = _is_recording(files) if has_manifest else all(_is_part_of_a_store(name) for name in names)
    if not is_ours:
        raise StoreExistsError(f"{location} is not empty and holds no recording. Choose another path.")
    if (has_manifest or shards) and not overwrite:
        raise StoreExistsError(
            f"{location} holds a recording already. Choose another path, or say overwrite=True to replace it."
        )
    with contextlib.ExitStack() as locks:
        for held in (files, *shards):
            locks.callback(FolderLock(held).release)
        with writing(location):
            _remove_recording(files)


def _is_recording(files: WritableFiles) -> bool:
    return any(_is_in(files, name, text) for name, text in FORMATS.items())


def _is_in(files: WritableFiles, name: str, text: bytes) -> bool:
    try:
        return text in files.read(name)
    except StoreDamagedError:  # no regular file
        return False


def _remove_recording(files: WritableFiles) -> None:
    """Remove a recording, its manifest first: loss of power never leaves a manifest whose chunks are gone."""
    files.remove(RUN)
    files.remove(MANIFEST)
    files.flush()
    for name in files.list():
        if _is_part_of_a_store(name) and name != LOCK:
            files.remove(name)


def _is_part_of_a_store(name: str) -> bool:
    prefixes = ("chunk-", "snapshot-", "totals-", "curvature-", "coefficients-", MANIFEST, RUN, SAMPLES)
    is_shard = SHARD_NAME.fullmatch(name) is not None
    return is_shard or name in (MANIFEST, LOCK, RUN) or name.lstrip(".").startswith(prefixes)
