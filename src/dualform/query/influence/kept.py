"""Curvature of a layer in a segment, kept in a file beside the store; of a store elsewhere, in the cache on this machine."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from dualform.arrays import Array
from dualform.curvature.maps import linear_maps
from dualform.curvature.sums import Curvature, Factors
from dualform.layers.layer import Layer
from dualform.query.influence.segments import Segment
from dualform.store.cache_files import cache_name, check_cache, read_cache, write_cache
from dualform.store.files import Files
from dualform.store.reader import Store

VERSION = 5
"""Of what is kept."""


def file_name(store: Store, layer: Layer, segment: Segment, *settings: int | str) -> str:
    """Return a name that says what the curvature was built from: the slots, the segment, and the settings."""
    built_from = [VERSION, asdict(layer), segment.begin, segment.end, *settings]
    return cache_name("curvature", store.manifest, segment.begin, segment.end, built_from)


def keep(files: Files, name: str, curvature: Curvature) -> None:
    """Write a file, if that is possible."""
    write_cache(files, name, _tensors(curvature))


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
    file = read_cache(store.files, name)
    if file is None:
        return None
    expected = _shapes(layer)
    if "norms" in file:
        expected["norms"] = (segment.rows,)
    check_cache(file, expected)
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
