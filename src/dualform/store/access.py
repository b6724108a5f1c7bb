"""Access to the files of a store: only regular files are opened, and the system's errors become store errors with a cure."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dualform.errors import DualformError, StoreDamagedError, StoreError, StorePermissionError, WriterError

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What else than a regular file a path may lead to."""

CURES = {
    errno.ENOSPC: "The disk is full: free some space, or choose a folder on another disk.",
    errno.EDQUOT: "Your disk quota is used up: free some space, or choose a folder on another disk.",
    errno.EFBIG: "The file system or a limit of the process (ulimit -f) allows no larger files: raise it, or record smaller chunks (chunk_bytes=).",
    errno.EMFILE: "Too many files are open: close some recordings, or raise the limit (ulimit -n).",
    errno.ENFILE: "Too many files are open on this machine: close other programs.",
    errno.ENOMEM: "There is not enough memory: close other programs.",
    errno.EIO: "The disk reports an error: check it, and work on a copy on another disk.",
}
"""How to mend what the system complains about."""

READ_AGAIN = " Try again, or open a copy of the recording on another disk."
WRITE_AGAIN = " Try again, or choose a folder on another disk."
"""What to do where nothing better is known."""

# O_NONBLOCK: opening a named pipe would wait for its other end. Windows has only some of these flags.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))


def check_regular(path: str | Path, status: os.stat_result, *, folder: bool = False) -> None:
    """Refuse what is no regular file (or no folder). status: as lstat gives it, so that links are not followed."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == (stat.S_IFDIR if folder else stat.S_IFREG):
        return
    expected = "folder" if folder else "regular file"
    found = KINDS.get(kind, "a file" if kind == stat.S_IFREG else "a special file")
    cure = "Restore it from a copy of the recording."
    if kind == stat.S_IFLNK:
        cure = f"Put the {expected} itself in its place; `cp -rL` copies a recording with its links resolved."
    raise StoreDamagedError(f"{path} is {found}; expected a {expected}. {cure}")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered. Links are not followed, and a named pipe is refused without waiting."""
    check_regular(path, os.lstat(path))
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    return _opened(path, descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """The content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def create(path: Path) -> BinaryIO:
    """Create a file for writing, unbuffered. Whatever has this name is removed first, so that no link is written through."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    return _opened(path, descriptor, "r+b")


def open_lock(path: Path) -> BinaryIO:
    """Open a lock file, or create it. What it holds stays."""
    with contextlib.suppress(FileNotFoundError):
        check_regular(path, os.lstat(path))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
    return _opened(path, descriptor, "r+b")


def _opened(path: Path, descriptor: int, mode: str) -> BinaryIO:
    try:
        check_regular(path, os.fstat(descriptor))  # it may have been replaced since lstat
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, mode, buffering=0)  # type: ignore[return-value]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the system into errors that say why a file or folder of a store cannot be read, and the cure."""
    try:
        yield
    except DualformError:
        raise
    except OSError as error:
        raise _read_error(path, error) from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the system into errors that say why a file or folder of a store cannot be written, and the cure."""
    try:
        yield
    except DualformError:
        raise
    except OSError as error:
        raise _write_error(path, error) from error


def cure_of(error: BaseException) -> str:
    """How to mend what the system complains about, as a sentence with a space before it; empty if that is not known."""
    known = CURES.get(error.errno or 0) if isinstance(error, OSError) else None
    return "" if known is None else f" {known}"


def _read_error(path: Path, error: OSError) -> StoreError:
    where = _named(path, error)
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        return StoreDamagedError(
            f"{where} is missing, though the manifest names it. Restore it from a copy of the recording."
        )
    if isinstance(error, PermissionError):
        return StorePermissionError(
            f"{where} cannot be read: {reason}. Ask its owner for the right to read it, or open a copy of the recording."
        )
    return StoreError(f"{where} cannot be read: {reason}.{cure_of(error) or READ_AGAIN}")


def _write_error(path: Path, error: OSError) -> StoreError:
    where = _named(path, error)
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StorePermissionError(
            f"{where} cannot be written: {reason}. Choose a folder that you may write to, or change its permissions."
        )
    return WriterError(f"{where} cannot be written: {reason}.{cure_of(error) or WRITE_AGAIN}")


def _named(path: Path, error: OSError) -> str:
    """The path that the system complains about, if it says so; within `path`, it may be a bare name."""
    if not isinstance(error.filename, (str, os.PathLike)):
        return str(path)
    named = os.fspath(error.filename)
    return named if named.startswith(str(path)) else f"{path} ({named})"
