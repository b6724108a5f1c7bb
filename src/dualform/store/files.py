"""Where the files of a store are: the interface, and a folder on this machine.

Nothing else in the store opens, lists, publishes or removes a file. A store elsewhere can be read through any class with the methods of
`Files`, and written through one with those of `WritableFiles`.

What is written is on the disk before it has its final name: files are written under another name and flushed, `publish` renames them and
flushes the folder. Only regular files are read, links are not followed, and the system's errors become store errors with a cure.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, runtime_checkable
from urllib.parse import unquote, urlsplit

import numpy as np
import xxhash

from dualform.arrays import Array, Bytes
from dualform.errors import (
    DualformError,
    StoreDamagedError,
    StoreError,
    StoreMissingError,
    StorePermissionError,
    WriterError,
)

BLOCK = 4096
"""Direct writes begin and end at multiples of it, in memory and in the file."""
STAGE = 4 << 20
"""At most this many bytes are copied before they are written."""
HOT = 256 << 10
"""This many bytes are copied and hashed at a time; they fit into a core's own cache."""
JOINED = 64 << 10
"""Smaller pieces are joined to this size first: a call for each would cost more than their bytes."""
DIRECT_FROM = 1 << 20
"""Smaller files are written through the page cache."""
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""How addresses begin: s3://, https://, file://."""
COLLAPSED = re.compile(r"(s3|s3a|gs|az|azure|abfs|abfss|https?|file):/(?!/)")
"""What pathlib makes of their beginning."""
PIECES = 512
"""At most this many pieces go into one call."""

T = TypeVar("T")


class Ranges(ABC):
    """The content of a file that is not mapped into memory: a slice of it is read when it is asked for."""

    @abstractmethod
    def __len__(self) -> int:
        """The size of the file."""

    @abstractmethod
    def __getitem__(self, part: slice) -> Bytes:
        """Return the bytes from `part.start` to `part.stop`."""

    @abstractmethod
    def hold(self, array: object, nbytes: int) -> None:
        """Keep an array that was made of a slice for a while: others are let go as soon as nobody uses them."""


class Output(Protocol):
    """A file that is being written: data first, then the header before it, which holds the checksums of the data."""

    def append(self, pieces: Sequence[Array]) -> str:
        """Write arrays one after the other; returns the checksum of all of them together."""

    def finish(self, header: bytes) -> None:
        """Write the header, and wait until everything is on the disk."""


@runtime_checkable
class Files(Protocol):
    """The files of one store, to be read by their names in it: `manifest.json`, `chunk-000000/rows.parquet`.

    Errors are store errors that say what is wrong and how to mend it; a missing file raises StoreDamagedError from FileNotFoundError.
    Questions that are answered in other processes (`executor=`) pickle it.
    """

    location: str
    """Where the store is, as messages call it: a folder, or an address."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`, or fewer if the file ends before."""

    def map(self, name: str) -> Bytes | Ranges:
        """Return the content of a file as an array, mapped into memory or a copy, or as what reads its slices on demand.

        Whoever writes to it changes no file.
        """


@runtime_checkable
class CachedFiles(Files, Protocol):
    """The files of a store that are read through a cache on this machine."""

    most_mapped: int
    """Arrays may stay mapped up to this many bytes together, for as long as the store is open."""

    def forget(self, name: str) -> None:
        """Drop what the cache holds of a file."""

    def look_up(self, names: Sequence[str]) -> None:
        """Find out the sizes of files, several at a time, as somebody is about to ask for them."""

    def fetch(self, names: Sequence[str]) -> None:
        """Read whole files into the cache, several at a time, as somebody is about to read them."""

    def made_files(self) -> LocalFiles:
        """A folder on this machine for files that are made from the store and can be made again."""


@runtime_checkable
class WritableFiles(Files, Protocol):
    """The files of a store that can be written as well. Writing raises the system's errors."""

    def list(self) -> list[str]:
        """Return the names of the files and folders in the store, in any order; none, if there is no store."""

    def create(self, name: str, header_size: int, data_size: int) -> AbstractContextManager[Output]:
        """Begin a file, which replaces one of the same name."""

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file, and wait until it is on the disk."""

    def publish(self, unfinished: str, name: str) -> None:
        """Give a file or folder that was written under another name its own, and wait until that is on the disk."""

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if there is one."""

    def flush(self) -> None:
        """Wait until the names in the store are on the disk."""

    def open_lock(self, name: str) -> BinaryIO:
        """Open the file that a writer locks, or create it."""


class FilesWithin:
    """The files of a folder within a store."""

    def __init__(self, files: Files, folder: str):
        """folder: with a slash at its end."""
        self._files = files
        self._folder = folder
        self.location = address(files, folder).rstrip("/")

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return self._files.size(self._folder + name)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return self._files.read(self._folder + name)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`, or fewer if the file ends before."""
        return self._files.read_range(self._folder + name, begin, end)

    def map(self, name: str) -> Bytes | Ranges:
        """Return the content of a file as an array, or as what reads its slices."""
        return self._files.map(self._folder + name)


class CachedFilesWithin(FilesWithin):
    """The files of a folder within a store that is read through a cache."""

    def __init__(self, files: CachedFiles, folder: str):
        """folder: with a slash at its end."""
        super().__init__(files, folder)
        self._cached = files
        self.most_mapped = files.most_mapped

    def forget(self, name: str) -> None:
        """Drop what the cache holds of a file."""
        self._cached.forget(self._folder + name)

    def look_up(self, names: Sequence[str]) -> None:
        """Find out the sizes of files, several at a time."""
        self._cached.look_up([self._folder + name for name in names])

    def fetch(self, names: Sequence[str]) -> None:
        """Read whole files into the cache, several at a time."""
        self._cached.fetch([self._folder + name for name in names])

    def made_files(self) -> LocalFiles:
        """A folder on this machine for files that are made from the store and can be made again."""
        return self._cached.made_files()


def files_within(files: Files, folder: str) -> Files:
    """Return the files of a folder within a store. folder: with a slash at its end; "": the store itself."""
    if not folder:
        return files
    return CachedFilesWithin(files, folder) if isinstance(files, CachedFiles) else FilesWithin(files, folder)


def address(files: Files, name: str) -> str:
    """Return what messages call a file."""
    return f"{files.location}/{name}"


def is_address(path: object) -> bool:
    """Whether a path is an address, such as s3://bucket/run, and not that of a folder."""
    return isinstance(path, str) and ADDRESS.match(path) is not None


def files_at(path: str | os.PathLike[str]) -> Files:
    """Return the files of the store at this path or address. What a user wants to read comes through here."""
    if is_address(path):
        _check_text(path)
        address = str(path)
        if urlsplit(address).scheme.lower() == "file":
            return folder_at(_folder_of(address))
        from dualform.store.remote import RemoteFiles

        return RemoteFiles(address)
    return folder_at(path)


def folder_at(path: str | os.PathLike[str]) -> LocalFiles:
    """Return the files of the store in this folder. What a user wants to write comes through here."""
    _check_path(path)
    return LocalFiles(path)


def _folder_of(address: str) -> str:
    """Return the folder that a file:// address names."""
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost"):
        raise StoreError(f"{address} names a folder on another machine; expected three slashes: file:///folder.")
    return unquote(parts.path)


def read_if_there(files: Files, name: str) -> bytes | None:
    """Return the content of a file; None if there is no such file."""
    try:
        return files.read(name)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def read_fitting(files: Files, name: str, read: Callable[[], T], fits: Callable[[T], bool]) -> T | None:
    """Return what is read of a file if it fits its checksum, else None.

    What comes out of a cache, or over a network, is read once more: the file itself may be whole.
    """
    found = read()
    if fits(found):
        return found
    if not isinstance(files, CachedFiles):
        return None
    files.forget(name)
    found = read()
    return found if fits(found) else None


def _check_path(path: object) -> None:
    """Refuse what cannot be, or cannot have been meant as, the path of a folder."""
    text = _check_text(path)
    if ADDRESS.match(text):
        raise StoreError(
            f"{text} is an address, which can only be read here; expected a folder on this machine. To put a recording there: "
            f"dualform copy FOLDER {text}."
        )
    scheme = COLLAPSED.match(text)
    if scheme and isinstance(path, os.PathLike):
        raise StoreError(
            f"{text} was an address before pathlib.Path took a slash away. Give it as a str: {scheme[1]}://…."
        )


def _check_text(path: object) -> str:
    """Return a path as text, if it can be one."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise StoreError(
            f"the path of a recording is of type {type(text).__name__}; expected a str or a pathlib.Path that names a folder."
        )
    if not text:
        raise StoreError('the path of a recording is empty; expected a folder, for example "runs/mnist".')
    if "\0" in text:
        raise StoreError(f"{text!r} contains a null byte, which no file system allows in a path. Choose another path.")
    if not _is_unicode(text):
        raise StoreError(f"{text!r} is not valid Unicode, which PyTorch expects of a path. Choose another path.")
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class LocalFiles:
    """The files of a store in a folder on this machine."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.location = str(self.folder)

    def __reduce__(self) -> tuple[type[LocalFiles], tuple[Path]]:
        return LocalFiles, (self.folder.absolute(),)  # another process may be in another folder

    def path(self, name: str) -> Path:
        """Return where a file is."""
        return self.folder / name

    def list(self) -> list[str]:
        """Return the names of the files and folders in the store, in any order; none, if there is no store."""
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            if self.folder.is_symlink():
                raise StoreMissingError(
                    f"{self.folder} is a symbolic link to a folder that does not exist. Create that folder, or choose another path."
                ) from None
            return []

    def size(self, name: str) -> int:
        """Return the size of a file, without opening it."""
        path = self.path(name)
        with reading(path):
            if "/" in name:
                check_regular(path.parent, os.lstat(path.parent), folder=True)
            status = os.lstat(path)
        check_regular(path, status)
        return status.st_size

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading, unbuffered."""
        path = self.path(name)
        with reading(path):
            return open_regular(path)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self.open(name) as file, reading(self.path(name)):
            return file.read()

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`, or fewer if the file ends before."""
        with self.open(name) as file, reading(self.path(name)):
            last = min(end, os.fstat(file.fileno()).st_size)
            file.seek(begin)
            return file.read(max(0, last - begin))

    def map(self, name: str) -> Bytes:
        """Map a file into memory: pages are read as they are used."""
        # Python's maps hold a file descriptor each, too many for the chunks of a long run. PyTorch's do not; but totals are read
        # before it is imported
        torch = sys.modules.get("torch")
        if torch is None:
            with self.open(name) as file, reading(self.path(name)):
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        path = self.path(name)
        size = self.size(name)
        try:
            storage = torch.UntypedStorage.from_file(str(path), False, size)
        except RuntimeError as error:  # PyTorch opens it by its name: it may be gone, or be another one
            raise StoreError(f"{path} cannot be mapped into memory: {error}.{READ_AGAIN}") from None
        mapped: Bytes = torch.asarray(storage, dtype=torch.uint8).numpy()
        return mapped

    @contextlib.contextmanager
    def create(self, name: str, header_size: int, data_size: int) -> Iterator[BlockOutput]:
        """Begin a file, which replaces one of the same name."""
        with self._create(name) as file:
            yield BlockOutput(file.fileno(), header_size, data_size)

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file, and wait until it is on the disk."""
        with self._create(name) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    def _create(self, name: str) -> BinaryIO:
        path = self.path(name)
        if "/" in name:
            path.parent.mkdir(exist_ok=True)
        return create(path)

    def publish(self, unfinished: str, name: str) -> None:
        """Rename a file or folder whose files are flushed, and wait until its new name is on the disk."""
        source = self.path(unfinished)
        if source.is_dir():
            flush_folder(source)
            self.remove(name)  # left by a run that was resumed earlier
            source.rename(self.path(name))
        else:
            source.replace(self.path(name))
        self.flush()

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if there is one; of a link, the link alone."""
        path = self.path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Wait until the names in the folder are on the disk."""
        flush_folder(self.folder)

    def open_lock(self, name: str) -> BinaryIO:
        """Open the file that a writer locks, or create it and the folder. What it holds stays."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            check_regular(path, os.lstat(path))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
        return _opened(path, descriptor, "r+b")


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BlockOutput:
    """A file that is written beside a training which wants the processor for itself.

    Each byte is fetched from memory once, for its checksum: whole blocks go to the disk from where they are, without a copy in the page
    cache (O_DIRECT), where system and file system can do so, as many as there are in one call. Recording in float32 takes a tenth of the
    training's time longer without. What does not begin at a block, in memory or in the file, is copied to a staging buffer first, and
    hashed while the cache still holds it.

    The staging buffer begins at a block of the file; the part of the first block that belongs to the header is written by `finish`.
    """

    def __init__(self, descriptor: int, header_size: int, data_size: int):
        self._descriptor = descriptor
        self._used = header_size % BLOCK
        self._waiting: list[memoryview] = []
        """Whole blocks that come before what the buffer holds, and are written with it."""
        self._direct = data_size >= DIRECT_FROM and _set_direct(descriptor, True)
        most = STAGE if self._direct else HOT
        blocks = -(-min(self._used + data_size, most) // BLOCK)
        memory = np.zeros((blocks + 1) * BLOCK, np.uint8)
        self._memory = memory[-memory.ctypes.data % BLOCK :][: blocks * BLOCK]
        os.lseek(descriptor, header_size - self._used, os.SEEK_SET)

    def append(self, pieces: Sequence[Array]) -> str:
        """Write arrays one after the other; returns the checksum of all of them together."""
        total = xxhash.xxh3_64()
        for piece in _joined(pieces):
            data = self._append_blocks(piece.reshape(-1).view(np.uint8), total)
            while len(data):
                staged = self._memory[self._used : self._used + min(len(data), HOT)]
                staged[:] = data[: len(staged)]
                total.update(staged.data)
                data = data[len(staged) :]
                self._used += len(staged)
                if self._used == len(self._memory):
                    self._write_staged(self._used)
        return total.hexdigest()

    def _append_blocks(self, data: Array, total: xxhash.xxh3_64) -> Array:
        """Hash the whole blocks that a piece begins with, which wait to be written from where they are; returns the rest."""
        whole = len(data) // BLOCK * BLOCK
        if not (self._direct and whole) or self._used % BLOCK or data.ctypes.data % BLOCK:
            return data
        if self._used:
            self._write_staged(self._used)
        total.update(data[:whole].data)
        self._waiting.append(data[:whole].data)
        return data[whole:]

    def _write_staged(self, count: int) -> None:
        """Write the waiting blocks, and the first bytes of the buffer, which must be all of it or whole blocks."""
        waiting = self._waiting
        self._waiting = []
        self._write(*waiting, self._memory[:count].data)
        self._used -= count

    def finish(self, header: bytes) -> None:
        """Write what is left and the header, and wait until everything is on the disk."""
        whole = self._used // BLOCK * BLOCK if self._direct else 0
        rest = self._memory[whole : self._used].data
        self._write_staged(whole)
        if self._direct:  # from here on, any number of bytes is written to any place
            self._direct = _set_direct(self._descriptor, False)
        self._write(rest)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._write(memoryview(header))
        os.fsync(self._descriptor)

    def _write(self, *pieces: memoryview) -> None:
        """Write at the file's present place."""
        left = [piece for piece in pieces if len(piece)]
        while left:
            done = self._write_some(left[:PIECES])
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def _write_some(self, pieces: list[memoryview]) -> int:
        try:
            return write_pieces(self._descriptor, pieces)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        self._direct = _set_direct(self._descriptor, False)  # some file systems refuse only now, not when asked
        return write_pieces(self._descriptor, pieces)


def write_pieces(descriptor: int, pieces: list[memoryview]) -> int:
    """Write some pieces, or a part of them; returns how many bytes. Windows has no call for several."""
    return os.writev(descriptor, pieces) if hasattr(os, "writev") else os.write(descriptor, pieces[0])


def _joined(pieces: Sequence[Array]) -> Iterator[Array]:
    """Join small pieces that follow each other."""
    group: list[Array] = []
    size = 0
    for piece in pieces:
        if group and size + piece.nbytes > JOINED:
            yield np.concatenate(group) if len(group) > 1 else group[0]
            group = []
            size = 0
        group.append(piece)
        size += piece.nbytes
    yield np.concatenate(group) if len(group) > 1 else group[0]


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Let writes bypass the page cache, or not; returns whether they do. System or file system may not support it."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    import fcntl  # not on Windows, which has no O_DIRECT either

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
    except OSError:
        return False
    return direct


# Regular files, and errors of the system

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
    errno.ENAMETOOLONG: "The path is too long: choose a shorter one.",
    errno.ELOOP: "Its symbolic links lead in a circle: remove them, or choose another path.",
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


def create(path: Path) -> BinaryIO:
    """Create a file for writing, unbuffered. Whatever has this name is removed first, so that no link is written through."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    return _opened(path, descriptor, "r+b")


def _opened(path: Path, descriptor: int, mode: str) -> BinaryIO:
    try:
        check_regular(path, os.fstat(descriptor))  # it may have been replaced since lstat
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, mode, buffering=0)  # type: ignore[return-value]


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn errors of the system into errors that say why a file or folder of a store cannot be read, and the cure."""
    try:
        yield
    except DualformError:
        raise
    except OSError as error:
        raise _read_error(path, error) from error


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
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


def _read_error(path: str | Path, error: OSError) -> StoreError:
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


def _write_error(path: str | Path, error: OSError) -> StoreError:
    where = _named(path, error)
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StorePermissionError(
            f"{where} cannot be written: {reason}. Choose a folder that you may write to, or change its permissions."
        )
    return WriterError(f"{where} cannot be written: {reason}.{cure_of(error) or WRITE_AGAIN}")


def _named(path: str | Path, error: OSError) -> str:
    """The path that the system complains about, if it says so; within `path`, it may be a bare name."""
    if not isinstance(error.filename, (str, os.PathLike)):
        return str(path)
    named = os.fspath(error.filename)
    return named if named.startswith(str(path)) else f"{path} ({named})"
