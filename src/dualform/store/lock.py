"""The lock on a store's folder: one writer at a time, and never a forked child of it.

`flock` belongs to the open file, which a forked child shares with its parent (a DataLoader worker, for example). So the lock is
released explicitly and not by closing the file, and a child closes its copy right after the fork: otherwise it would keep the folder
locked after its parent was killed.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import BinaryIO

from dualform.errors import StoreExistsError
from dualform.store.access import open_lock, writing
from dualform.store.format import LOCK

try:
    import fcntl
except ImportError:  # Windows: the second writer is then found by the folder's content alone
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """Holds a folder against other writers until it is released, or until the process ends."""

    def __init__(self, folder: Path):
        self._file: BinaryIO | None = None
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                return
            file = open_lock(folder / LOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = file
            _HELD.add(self)
        except OSError:
            file.close()
            raise StoreExistsError(
                f"{folder} is being written by another recorder (it holds {LOCK}). Record into another folder, or wait."
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
