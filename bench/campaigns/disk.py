"""A model of a disk under a file system that keeps no promise but those of POSIX.

What was written is safe after fsync of the file; what was created, renamed or removed in a folder is safe after fsync of the
folder. All else may be on the disk after a loss of power, or not, or a part of it, in any order. A rename happens as a
whole or not at all.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.system_calls import KINDS

SECTOR = 512
"""A disk writes so many bytes as a whole."""


@dataclass(frozen=True)
class Call:
    """One system call of a trace."""

    kind: str
    serial: int
    """The number of the open file."""
    offset: int
    """Of a write; of an open, 1: the file is new, 2: it was emptied; of a mark, its value."""
    path: str
    other: str
    data: bytes


def read_trace(trace: bytes) -> Iterator[Call]:
    """The calls that system_calls.c has written down."""
    head = struct.Struct("iiiiqq")
    at = 0
    while at < len(trace):
        kind, serial, path, other, offset, size = head.unpack_from(trace, at)
        at += head.size
        has_data = KINDS[kind] == "write"
        ends = [at + path, at + path + other, at + path + other + (size if has_data else 0)]
        yield Call(
            KINDS[kind],
            serial,
            offset,
            trace[at : ends[0]].decode(),
            trace[ends[0] : ends[1]].decode(),
            trace[ends[1] : ends[2]],
        )
        at = ends[2]


@dataclass(eq=False)
class File:
    """Bytes that are safe, and writes that are not yet: (offset, bytes), or (size, None) for a change of length."""

    safe: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def content(self, writes: list[tuple[int, bytes | None]]) -> bytes:
        """The safe bytes after some writes."""
        found = bytearray(self.safe)
        for offset, data in writes:
            size = offset if data is None else offset + len(data)
            if len(found) < size:
                found.extend(bytes(size - len(found)))
            if data is None:
                del found[offset:]
            else:
                found[offset:size] = data
        return bytes(found)


Change = dict[str, "File | Folder | None"]
"""What one call does to the entries of a folder: a new entry, or None where one is removed."""


@dataclass(eq=False)
class Folder:
    """Entries that are safe, and changes that are not yet."""

    safe: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def entries(self, changes: list[Change]) -> dict[str, File | Folder]:
        """The safe entries after some changes."""
        found = dict(self.safe)
        for change in changes:
            for name, entry in change.items():
                if entry is None:
                    found.pop(name, None)
                else:
                    found[name] = entry
        return found

    @property
    def now(self) -> dict[str, File | Folder]:
        """The entries as programs see them."""
        return self.entries(self.pending)


class Disk:
    """The tree below one folder; the entry of this folder itself in its parent counts as safe."""

    def __init__(self, folder: Path):
        """Begin with what is there, which counts as safe."""
        self._path = folder
        self._root = _loaded(folder)
        self._open: dict[int, File | Folder] = {}
        self.promised: int | None = None
        """The value of the last mark."""

    def apply(self, call: Call) -> None:
        """One more call."""
        if call.kind == "mark":
            self.promised = call.offset
        elif call.kind in ("open", "create"):
            self._opened(call)
        elif call.kind == "write":
            self._file(call).pending.append((call.offset, call.data))
        elif call.kind == "truncate":
            self._file(call).pending.append((call.offset, None))
        elif call.kind == "fsync":
            self._flush(self._open[call.serial])
        elif call.kind == "rename":
            self._rename(call)
        else:
            folder, name = self._place(call.path)
            folder.pending.append({name: Folder() if call.kind == "mkdir" else None})

    def everything(self) -> dict[str, bytes]:
        """All files, as programs see them: bytes by path."""
        return _files(self._root, lambda _, pending: pending)

    def after_power_loss(self, draw: random.Random, mode: str) -> dict[str, bytes]:
        """All files that are left: bytes by path.

        mode: what becomes of that which was not flushed: "lost", "kept", "any" (each change by itself) or "torn" (each sector).
        """
        return _files(self._root, lambda entry, pending: _survivors(entry, pending, draw, mode))

    def _opened(self, call: Call) -> None:
        if call.path == str(self._path):
            self._open[call.serial] = self._root
            return
        folder, name = self._place(call.path)
        if call.offset == 1:
            folder.pending.append({name: File()})
        entry = folder.now[name]
        if call.offset == 2 and isinstance(entry, File):
            entry.pending.append((0, None))
        self._open[call.serial] = entry

    def _rename(self, call: Call) -> None:
        old_folder, old = self._place(call.path)
        new_folder, new = self._place(call.other)
        if old_folder is not new_folder:
            raise ValueError(f"{call.path} is renamed to another folder: the model does not know how")
        old_folder.pending.append({old: None, new: old_folder.now[old]})

    def _flush(self, entry: File | Folder) -> None:
        if isinstance(entry, File):
            entry.safe = entry.content(entry.pending)
        else:
            entry.safe = entry.now
        entry.pending = []

    def _file(self, call: Call) -> File:
        entry = self._open[call.serial]
        assert isinstance(entry, File)
        return entry

    def _place(self, path: str) -> tuple[Folder, str]:
        """The folder of a path, and its name there."""
        *parents, name = Path(path).relative_to(self._path).parts
        folder = self._root
        for parent in parents:
            entry = folder.now[parent]
            assert isinstance(entry, Folder)
            folder = entry
        return folder, name


def _loaded(path: Path) -> Folder:
    folder = Folder()
    if path.exists():
        for entry in path.iterdir():
            folder.safe[entry.name] = _loaded(entry) if entry.is_dir() else File(entry.read_bytes())
    return folder


def _files(folder: Folder, choose: object, prefix: str = "") -> dict[str, bytes]:
    assert callable(choose)
    found: dict[str, bytes] = {}
    for name, entry in folder.entries(choose(folder, folder.pending)).items():
        if isinstance(entry, Folder):
            found |= _files(entry, choose, f"{prefix}{name}/")
        else:
            found[prefix + name] = entry.content(choose(entry, entry.pending))
    return found


def _survivors(entry: File | Folder, pending: list[object], draw: random.Random, mode: str) -> list[object]:
    if mode == "lost":
        return []
    if mode == "kept":
        return pending
    survivors = [change for change in pending if draw.random() < 0.5]
    if mode == "any" or isinstance(entry, Folder):
        return survivors
    torn: list[object] = []
    for change in survivors:
        assert isinstance(change, tuple)
        offset, data = change
        if data is None:
            torn.append(change)
            continue
        sectors = [(offset + low, data[low : low + SECTOR]) for low in range(0, len(data), SECTOR)]
        torn += [sector for sector in sectors if draw.random() < 0.5]
    return torn
