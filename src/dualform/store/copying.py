"""`dualform.copy`: a recording from a folder to an address, or back; what is there already is not copied again.

Files that name others (manifest.json, run.json) come last, so that whoever opens the copy finds all of it or none of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dualform.errors import StoreDamagedError, StoreError, StoreExistsError, StoreMissingError
from dualform.progress import Progress
from dualform.store.files import (
    Files,
    LocalFiles,
    address,
    create,
    files_at,
    files_within,
    flush_folder,
    folder_at,
    is_address,
    read_if_there,
    writing,
)
from dualform.store.format import LOCK, MANIFEST, File, Manifest, checksum, read_manifest, totals_files
from dualform.store.lock import FolderLock
from dualform.store.samples import SAMPLES
from dualform.store.shards import RUN, is_run, read_run, shard_name
from dualform.store.tensors import ArrayFile, describe_file

NOT_COPIED = ("chunk-", "snapshot-", "totals-", "curvature-", "coefficients-", ".")
"""How files and folders begin that count only if a manifest names them, or that can be made again."""
COPYING = ".copying"
"""Marks a folder whose copy is not whole yet."""
UNFINISHED = ".unfinished-"
"""How the names of files begin that are being copied."""
AT_A_TIME = 4
"""Files that are copied at a time."""
PIECE = 16 << 20
"""A file is written to a folder in pieces of this size."""
FIRST_LINE = 17
"""Bytes of the checksum that the table of samples begins with, and of the line's end."""


@dataclass(frozen=True)
class Copied:
    """What a copy has done."""

    location: str
    """Where the copy is."""
    files: int
    """How many files it has, but for those that name others (manifests), which are written each time."""
    copied: int
    """How many of them were copied; the others were there."""
    nbytes: int
    """How many bytes were copied."""


class Target(Protocol):
    """Where a copy is put."""

    @property
    def files(self) -> Files:
        """What is there."""

    def put(self, source: Files, name: str, check: Callable[[Files, str], None]) -> None:
        """Copy a file, so that it is there as a whole or not at all. check: raises an error if it is not as it should be."""

    def put_bytes(self, name: str, content: bytes) -> None:
        """Write a file of this content, in the same way."""

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""

    def release(self, *, is_whole: bool) -> None:
        """Let others write again. is_whole: whether all of the copy is there."""


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str], *, progress: Progress | None = None) -> Copied:
    """Copy a recording: from a folder to an address (s3://bucket/run), from an address to a folder, or between two folders.

    An interrupted copy goes on where it stopped: what is there with the same checksum is skipped. Nobody can open the copy before all
    of it is there. Of a recording that has been trained further since, only what is new is copied.
    """
    files = files_at(source)
    plan_copy(files)  # raises an error before anything is made at the target
    copier = Copier(files, open_target(target))
    is_whole = False
    try:
        copied = copier.run(progress)
        is_whole = True
        return copied
    finally:
        copier.target.release(is_whole=is_whole)


def open_target(path: str | os.PathLike[str]) -> Target:
    """Return what puts files in a folder, or at an address."""
    if is_address(path):
        files = files_at(path)
        if isinstance(files, LocalFiles):
            return FolderTarget(files)
        from dualform.store.uploads import AddressTarget

        return AddressTarget(str(path))
    return FolderTarget(folder_at(path))


@dataclass
class Copier:
    """Copies a recording, and goes on with it when it has grown."""

    source: Files
    target: Target
    _done: dict[str, File] = field(default_factory=dict)
    """Files that are known to be at the target, as manifests describe them."""

    def run(self, progress: Progress | None = None) -> Copied:
        """Copy what is not there yet."""
        plan = plan_copy(self.source)
        earlier = self._earlier(plan)
        missing = [name for name in plan.files if not self._is_there(plan, name)]
        if any(name in earlier for name in missing):
            # What the copy's manifest names is about to be another file: until all of it is there, there is no copy
            for name in reversed(plan.heads):
                self.target.remove(name)
        copied = 0
        for nbytes in self._copy_all(plan, missing, progress):
            copied += nbytes
        for name, content in plan.heads.items():
            self.target.put_bytes(name, content)
        return Copied(self.target.files.location, len(plan.files), len(missing), copied)

    def _earlier(self, plan: Plan) -> set[str]:
        """Return the files that manifests at the target name. Raises StoreExistsError if they are of another recording."""
        named: set[str] = set()
        for folder, manifest in plan.manifests.items():
            files = self.target.files
            if read_if_there(files, f"{folder}{MANIFEST}") is None:
                continue
            there = read_manifest(files_within(files, folder))
            if there.run != manifest.run:
                raise StoreExistsError(
                    f"{files.location} holds another recording already. Choose another place for the copy, or remove that one."
                )
            named.update(f"{folder}{name}" for name, _ in there.files())
        return named

    def _is_there(self, plan: Plan, name: str) -> bool:
        described = plan.files[name]
        if described is not None and self._done.get(name) == described:
            return True
        files = self.target.files
        try:
            if files.size(name) != self.source.size(name):
                return False
            is_there = identity(files, name) == identity(self.source, name)
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError) or isinstance(error, StoreDamagedError):
                return False
            raise
        if is_there and described is not None:
            self._done[name] = described
        return is_there

    def _copy_all(self, plan: Plan, names: list[str], progress: Progress | None) -> Iterator[int]:
        """Copy files, several at a time; yields the size of each."""

        def copy_one(name: str) -> int:
            described = plan.files[name]
            self.target.put(self.source, name, lambda files, name: check_file(files, name, described))
            if described is not None:
                self._done[name] = described
            return self.source.size(name)

        if progress is not None:
            progress("copying", 0, len(names))
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            tasks = [pool.submit(copy_one, name) for name in names]
            try:
                for done, task in enumerate(as_completed(tasks), 1):
                    yield task.result()
                    if progress is not None:
                        progress("copying", done, len(names))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


@dataclass(frozen=True)
class Plan:
    """What a copy consists of."""

    files: dict[str, File | None]
    """By name; None: no manifest describes the file."""
    manifests: dict[str, Manifest]
    """By folder: "" or "rank-0/"."""
    heads: dict[str, bytes]
    """Files that name others, in the order in which they are written: what they hold was read before the others are copied."""


def plan_copy(source: Files) -> Plan:
    """Find out which files a recording consists of. Files beside it, such as texts and settings, belong to it where they can be listed."""
    names = _listed(source)
    heads = [name for name in names if name.rpartition("/")[2] in (MANIFEST, RUN)]
    # Folders first; a run's own file comes after those of its ranks
    heads.sort(key=lambda name: (-name.count("/"), name))
    contents = {name: source.read(name) for name in heads}
    manifests = {}
    files: dict[str, File | None] = {}
    for name in heads:
        folder, _, last = name.rpartition("/")
        folder = f"{folder}/" if folder else ""
        if last == RUN:
            totals = read_run(files_within(source, folder)).totals
            if totals is not None:
                files |= {f"{folder}{file}": described for file, described in totals_files(totals)}
        else:
            manifests[folder] = read_manifest(files_within(source, folder))
            files |= {f"{folder}{file}": described for file, described in manifests[folder].files()}
    if not manifests:
        read_manifest(source)  # says what is missing
        raise StoreMissingError(f"{source.location} holds no recording.")
    others = [name for name in names if name not in files and name not in contents and _belongs(name)]
    return Plan({**files, **dict.fromkeys(others)}, manifests, contents)


def _listed(source: Files) -> list[str]:
    """Return the names of all files; of a web server, which has no lists, of those that a manifest may come with."""
    if isinstance(source, LocalFiles):
        folder = source.folder
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    from dualform.store.remote import RemoteFiles

    if isinstance(source, RemoteFiles) and source.has_lists:
        return sorted(source.list_all())
    heads = [MANIFEST]
    if is_run(source):
        ranks = range(read_run(source).ranks)
        heads = [RUN, *(f"{shard_name(rank)}/{MANIFEST}" for rank in ranks)]
    return [name for name in (*heads, SAMPLES) if read_if_there(source, name) is not None]


def _belongs(name: str) -> bool:
    """Whether a file that no manifest names is copied: none that is unfinished or left over."""
    parts = name.split("/")
    return parts[-1] != LOCK and not any(part.startswith(NOT_COPIED) for part in parts)


def identity(files: Files, name: str) -> tuple[int, str]:
    """Return what two files with the same content have in common, without reading all of a large one.

    The header of a file of tensors has the checksums of all of them; the table of samples begins with its own.
    """
    size = files.size(name)
    if name.endswith(".safetensors"):
        return size, describe_file(files, name).checksum
    if name.rpartition("/")[2] == SAMPLES:
        return size, files.read_range(name, 0, FIRST_LINE).decode(errors="replace")
    return size, checksum(files.read(name))


def check_file(files: Files, name: str, described: File | None) -> None:
    """Raise StoreDamagedError unless a file is as a manifest describes it, to the last byte."""
    if described is None:
        return
    if name.endswith(".safetensors"):
        file = ArrayFile(files, name, described)
        for array in file:
            file[array]
    elif checksum(files.read(name)) != described.checksum:
        raise StoreDamagedError(f"{address(files, name)} is damaged: its checksum does not fit the manifest.")


class FolderTarget:
    """Puts files in a folder on this machine."""

    def __init__(self, files: LocalFiles):
        self.files = files
        with writing(files.location):
            names = files.list()
            if names and not {MANIFEST, RUN, COPYING} & set(names):
                raise StoreExistsError(
                    f"{files.location} is not empty and holds no recording. Choose another folder for the copy."
                )
            files.folder.mkdir(parents=True, exist_ok=True)
            files.path(COPYING).touch()
        self._lock = FolderLock(files)

    def put(self, source: Files, name: str, check: Callable[[Files, str], None]) -> None:
        """Copy a file, so that it is there as a whole or not at all. check: raises an error if it is not as it should be."""
        path = self.files.path(name)
        unfinished = path.with_name(f"{UNFINISHED}{path.name}")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                download(source, name, unfinished, check)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
            flush_folder(path.parent)

    def put_bytes(self, name: str, content: bytes) -> None:
        """Write a file of this content, in the same way."""
        folder, _, last = name.rpartition("/")
        unfinished = f"{folder}/.{last}" if folder else f".{last}"
        with writing(self.files.location):
            self.files.write(unfinished, content)
            self.files.publish(unfinished, name)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with writing(self.files.location):
            self.files.remove(name)
            self.files.flush()

    def release(self, *, is_whole: bool) -> None:
        """Let others write again."""
        if is_whole:
            self.files.remove(COPYING)
        self._lock.release()


def download(source: Files, name: str, path: Path, check: Callable[[Files, str], None]) -> None:
    """Write a file of a store to a path and check it there; once more, if it was damaged on the way."""
    for is_last in (False, True):
        size = source.size(name)
        with create(path) as file:
            for low in range(0, size, PIECE):
                file.write(_piece(source, name, low, min(low + PIECE, size)))
            os.fsync(file.fileno())
        try:
            check(LocalFiles(path.parent), path.name)
        except StoreDamagedError as error:
            if is_last or isinstance(source, LocalFiles):
                raise StoreDamagedError(str(error).replace(str(path), address(source, name))) from None
        else:
            return


def _piece(source: Files, name: str, low: int, high: int) -> bytes:
    if isinstance(source, LocalFiles):
        return source.read_range(name, low, high)
    from dualform.store.remote import RemoteFiles

    if isinstance(source, RemoteFiles):
        return source.download(name, low, high).tobytes()  # past the cache, which would hold all of it once more
    return source.read_range(name, low, high)
