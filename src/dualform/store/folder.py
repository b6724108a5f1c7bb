"""The folder of a store: who may write it, what may be overwritten, and how a manifest is published."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from dualform.errors import StoreDamagedError, StoreExistsError
from dualform.store.access import create, read_regular, reading, writing
from dualform.store.format import LOCK, MANIFEST, File, Manifest, checksum, load_manifest
from dualform.store.labels import LABEL
from dualform.store.lock import FolderLock


def publish(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest, once everything that it names is on the disk."""
    flush_folder(folder)
    unfinished = folder / f".{MANIFEST}"
    write_bytes(unfinished, manifest.dump())
    unfinished.replace(folder / MANIFEST)
    flush_folder(folder)


def write_table(path: Path, table: pl.DataFrame, label: str) -> File:
    """Write and flush a table. label: see store/labels.py."""
    buffer = io.BytesIO()
    table.write_parquet(buffer, compression="zstd", statistics=False, metadata={LABEL: label})
    data = buffer.getvalue()
    write_bytes(path, data)
    return File(len(data), checksum(data), table.height)


def write_bytes(path: Path, data: bytes) -> None:
    """Write and flush a file."""
    with create(path) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a store against other writers; it must exist."""
    load_manifest(folder)
    held = FolderLock(folder)
    try:
        yield
    finally:
        held.release()


def prepare(folder: Path, *, overwrite: bool) -> None:
    """Make room for a new store, or say why not. Only a recording is ever overwritten."""
    with reading(folder):
        if not folder.exists():
            return
        if not folder.is_dir():
            raise StoreExistsError(f"{folder} is a file; a recording is a folder. Choose another path.")
        names = [path.name for path in folder.iterdir()]
    if not names:
        return
    begun = MANIFEST in names  # else at most the leftovers of a recording killed before its first manifest
    foreign = not _is_recording(folder) if begun else not all(map(_ours, names))
    if foreign:
        raise StoreExistsError(f"{folder} is not empty and holds no recording. Choose another path.")
    if begun and not overwrite:
        raise StoreExistsError(
            f"{folder} holds a recording already. Choose another path, or say overwrite=True to replace it."
        )
    held = FolderLock(folder)
    try:
        with writing(folder):
            _remove(folder)
    finally:
        held.release()


def _is_recording(folder: Path) -> bool:
    path = folder / MANIFEST
    with reading(path):
        try:
            return b'"format": "dualform"' in read_regular(path)
        except StoreDamagedError:  # no regular file
            return False


def _remove(folder: Path) -> None:
    """Remove a recording, its manifest first: loss of power never leaves a manifest whose chunks are gone."""
    (folder / MANIFEST).unlink(missing_ok=True)
    flush_folder(folder)
    for path in folder.iterdir():
        if not _ours(path.name) or path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _ours(name: str) -> bool:
    """Whether a file or folder is part of a store."""
    return name in (MANIFEST, LOCK) or name.lstrip(".").startswith(
        ("chunk-", "snapshot-", "totals-", "curvature-", MANIFEST)
    )
