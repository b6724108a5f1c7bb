"""Curvature of a layer in a segment, kept in a file beside the store; of a store elsewhere, in the cache on this machine.

It is a convenience, not part of the store: the file is named by what it was built from, and built again when that changes.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from threading import get_ident

import numpy as np

from dualform.arrays import Array
from dualform.curvature.maps import linear_maps
from dualform.curvature.sums import Curvature, Factors
from dualform.errors import StoreDamagedError, StoreError
from dualform.layers.layer import Layer
from dualform.query.influence.segments import Segment
from dualform.store.files import CachedFiles, Files, WritableFiles
from dualform.store.format import SLOTS, checksum
from dualform.store.reader import Store
from dualform.store.tensors import TensorFile, describe_file, write_tensors

VERSION = 5
"""Of what is kept."""


def file_name(store: Store, layer: Layer, segment: Segment, *settings: int | str) -> str:
    """Return a name that says what the curvature was built from: the slots, the segment, and the settings."""
    chunks = [
        [chunk.first_step, chunk.end_step, chunk.files[SLOTS].checksum]
        for chunk in store.manifest.chunks
        if chunk.first_step < segment.end and chunk.end_step > segment.begin
    ]
    content = [VERSION, asdict(layer), segment.begin, segment.end, *settings, chunks]
    return f"curvature-{checksum(json.dumps(content).encode())}.safetensors"


def keep(files: Files, name: str, curvature: Curvature) -> None:
    """Write a file, if that is possible: a store that cannot be written answers all the same."""
    files = _where_kept(files)
    if not isinstance(files, WritableFiles):
        return
    # A name of its own: other threads and processes may be building the same
    unfinished = f".{name}.{os.getpid()}.{get_ident()}"
    with contextlib.suppress(OSError):
        try:
            write_tensors(files, unfinished, _tensors(curvature))
            files.publish(unfinished, name)
        finally:
            files.remove(unfinished)


def _where_kept(files: Files) -> Files:
    return files.made_files() if isinstance(files, CachedFiles) else files


def _tensors(curvature: Curvature) -> dict[str, list[Array]]:
    tensors: dict[str, list[Array]] = {}
    for number, factors in enumerate(curvature.maps):
        tensors[f"{number}.keys"] = [factors.keys.numpy()]
        tensors[f"{number}.errors"] = [factors.errors.numpy()]
        tensors[f"{number}.positions"] = [np.array([factors.positions])]
    if curvature.norms is not None:
        tensors["norms"] = [curvature.norms.numpy()]
    return tensors


def read_kept(store: Store, layer: Layer, segment: Segment, name: str) -> Curvature | None:
    """Return what was kept under this name; None: nothing."""
    files = _where_kept(store.files)
    try:
        described = describe_file(files, name)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    file = TensorFile(files, name, described)
    expected = _shapes(layer)
    if "norms" in file:
        expected["norms"] = (segment.rows,)
    if {tensor: file.shape(tensor) for tensor in file} != expected:
        raise StoreDamagedError(
            f"{file.path} is damaged: its tensors are not of the expected shapes. Delete it: it is built again."
        )
    maps = []
    for number in range(len(linear_maps(layer))):
        positions = float(file[f"{number}.positions"])
        maps.append(Factors(file[f"{number}.keys"], file[f"{number}.errors"], positions))
    return Curvature(maps, file["norms"] if "norms" in file else None)


def _shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are kept for a layer, without the norms."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, linear_map in enumerate(linear_maps(layer)):
        groups = linear_map.groups
        width = linear_map.width + bool(linear_map.constant)
        shapes[f"{number}.keys"] = (linear_map.width,) if linear_map.is_one_hot else (groups, width, width)
        shapes[f"{number}.errors"] = (groups, linear_map.outputs, linear_map.outputs)
        shapes[f"{number}.positions"] = (1,)
    return shapes
