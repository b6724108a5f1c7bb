"""The folder of a store: who may write it, what may be overwritten, and how a manifest is published."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import polars as pl

from dualform.errors import StoreExistsError
from dualform.store.format import LOCK, MANIFEST, File, Manifest, checksum, load_manifest

try:
    import fcntl
except ImportError:  # Windows: the second writer is then found by the folder's content alone
    fcntl = None  # type: ignore[assignment]


def publish(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest, once everything that it names is on the disk."""
    flush_folder(folder)
    unfinished = folder / f".{MANIFEST}"
    with unfinished.open("wb") as file:
        file.write(manifest.dump())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MANIFEST)
    flush_folder(folder)


def write_table(path: Path, table: pl.DataFrame) -> File:
    """Write and flush a table."""
    table.write_parquet(path, compression="zstd", statistics=False)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        data = file.read()
    return File(len(data), checksum(data))


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(folder: Path) -> TextIO | None:
    """Hold a folder against other writers, until the file is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        return None
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StoreExistsError(
            f"{folder} is being written by another recorder (it holds {LOCK}). Record into another folder, or wait."
        ) from None
    return file


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a store against other writers; it must exist."""
    load_manifest(folder)
    held = lock(folder)
    try:
        yield
    finally:
        if held is not None:
            held.close()


def prepare(folder: Path, *, overwrite: bool) -> None:
    """Make room for a new store, or say why not. Only a recording is ever overwritten."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StoreExistsError(f"{folder} is a file; a recording is a folder. Choose another path.")
    if not any(folder.iterdir()):
        return
    begun = (folder / MANIFEST).exists()  # else at most the leftovers of a recording killed before its first manifest
    foreign = begun and b'"format": "dualform"' not in (folder / MANIFEST).read_bytes()
    if foreign or (not begun and not all(_ours(path.name) for path in folder.iterdir())):
        raise StoreExistsError(f"{folder} is not empty and holds no recording. Choose another path.")
    if begun and not overwrite:
        raise StoreExistsError(
            f"{folder} holds a recording already. Choose another path, or say overwrite=True to replace it."
        )
    held = lock(folder)
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in folder.iterdir():
            if _ours(path.name) and path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        if held is not None:
            held.close()


def _ours(name: str) -> bool:
    """Whether a file or folder is part of a store."""
    return name in (MANIFEST, LOCK) or name.lstrip(".").startswith(
        ("chunk-", "snapshot-", "totals-", "curvature-", MANIFEST)
    )
