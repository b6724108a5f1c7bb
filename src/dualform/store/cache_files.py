"""Files beside a store that hold what questions would otherwise compute again; of a store elsewhere, in the cache on this machine.

They are no part of the store.
A file is named by what it was built from, and built again when that changes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any

from dualform.arrays import Array
from dualform.errors import StoreDamagedError, StoreError
from dualform.store.files import CachedFiles, Files, WritableFiles
from dualform.store.format import SLOTS, Manifest, checksum
from dualform.store.tensors import TensorFile, describe_file, write_tensors


def cache_name(kind: str, manifest: Manifest, begin: int, end: int, built_from: Sequence[Any]) -> str:
    """Return a name that says what a file was built from: the slots of the steps begin to end, and what else matters."""
    chunks = [
        [chunk.first_step, chunk.end_step, chunk.files[SLOTS].checksum]
        for chunk in manifest.chunks
        if chunk.first_step < end and chunk.end_step > begin
    ]
    content = [*built_from, chunks]
    return f"{kind}-{checksum(json.dumps(content).encode())}.safetensors"


def write_cache(files: Files, name: str, tensors: Mapping[str, Sequence[Array]]) -> None:
    """Write a file, if that is possible: a store that cannot be written answers all the same."""
    files = _where_kept(files)
    if not isinstance(files, WritableFiles):
        return
    # A name of its own: other threads and processes may be building the same
    unfinished = f".{name}.{os.getpid()}.{get_ident()}"
    with contextlib.suppress(OSError):
        try:
            write_tensors(files, unfinished, tensors)
            files.publish(unfinished, name)
        finally:
            files.remove(unfinished)


def read_cache(files: Files, name: str) -> TensorFile | None:
    """Return a file; None: there is none."""
    files = _where_kept(files)
    try:
        described = describe_file(files, name)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    return TensorFile(files, name, described)


def check_cache(file: TensorFile, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a file whose tensors have other shapes than expected."""
    if {tensor: file.shape(tensor) for tensor in file} != expected:
        raise StoreDamagedError(
            f"{file.path} is damaged: its tensors are not of the expected shapes. Delete it: it is built again."
        )


def _where_kept(files: Files) -> Files:
    return files.made_files() if isinstance(files, CachedFiles) else files
