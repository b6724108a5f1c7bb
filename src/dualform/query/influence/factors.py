"""The factors of a run: curvature of every linear map in every segment, from slots or as recorded, kept beside the slots.

What is kept is a convenience, not part of the store: it is named by what it was built from, and built again when that changes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from threading import get_ident

import numpy as np
import torch
from torch import Tensor

from dualform.curvature.loss_mean import RECORDED_MEAN, LossMean
from dualform.curvature.maps import linear_maps
from dualform.curvature.sums import DAMPING, Curvature, Factors, Sums, damped
from dualform.errors import StoreDamagedError, StoreError
from dualform.layers.streams import Layer
from dualform.progress import Progress, report
from dualform.query.influence.segments import RowPiece, Segment, one_slot_a_row, row_pieces, windows
from dualform.store.files import Array, WritableFiles
from dualform.store.format import NO_ROW, SLOTS, checksum
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.tensors import TensorFile, describe_file, write_tensors

SLOTS_TAKEN = 16384
"""How many slots of a segment a layer's curvature is computed from, at steps spread over it."""
STEPS_TAKEN = 16
"""From at least this many steps, if there are as many."""
VERSION = 5
"""Of what is kept."""
ROWS = 8192
"""How many rows are read at a time."""

ByLayer = dict[str, Curvature]


def factors(
    store: Store,
    layers: Sequence[Layer],
    segments: Sequence[Segment],
    loss_mean: LossMean,
    progress: Progress | None = None,
) -> list[ByLayer]:
    """For each segment and layer the factors of the layer's maps: those kept beside the store, or built and then kept."""
    found: list[ByLayer] = [{} for _ in segments]
    work = [(place, layer) for place in range(len(segments)) for layer in layers]
    for place, layer in report("curvature", work, progress):
        found[place][layer.name] = _factors(store, layer, segments[place], loss_mean)
    return found


def _factors(store: Store, layer: Layer, segment: Segment, loss_mean: LossMean) -> Curvature:
    name = _name(store, layer, segment, loss_mean.mean)
    kept = _kept(store, layer, segment, name)
    if kept is not None:
        return kept
    built = built_factors(store, layer, segment, loss_mean)
    tensors = {
        f"{n}.{part}": [tensor.numpy()]
        for n, one in enumerate(built.maps)
        for part, tensor in (
            ("keys", one.keys),
            ("errors", one.errors),
            ("positions", torch.tensor([one.positions], dtype=torch.float64)),
        )
    }
    if built.norms is not None:
        tensors["norms"] = [built.norms.numpy()]
    if isinstance(store.files, WritableFiles):
        _keep(store.files, name, tensors)
    return built


def _keep(files: WritableFiles, name: str, tensors: dict[str, list[Array]]) -> None:
    """Write a file beside the store, if that is possible: a store that cannot be written answers all the same."""
    # A name of its own: other threads and processes may be building the same
    unfinished = f".{name}.{os.getpid()}.{get_ident()}"
    with contextlib.suppress(OSError):
        try:
            write_tensors(files, unfinished, tensors)
            files.publish(unfinished, name)
        finally:
            files.remove(unfinished)


def built_factors(store: Store, layer: Layer, segment: Segment, loss_mean: LossMean) -> Curvature:
    """As it was counted while recording, or from slots that are spread evenly over the segment."""
    calls = [
        (chunk, block)
        for chunk in store.chunks(layer.name, begin_step=segment.begin, end_step=segment.end)
        for block in np.flatnonzero((chunk.blocks[:, 0] >= segment.begin) & (chunk.counts > 0)).tolist()
    ]
    slots = sum(_written(chunk, block) for chunk, block in calls)
    positions = slots / max(1, _rows(calls))
    maps = recorded_factors(store, layer, segment, positions) if loss_mean.mean == RECORDED_MEAN else None
    if maps is None:
        maps = [one.factors(positions) for one in _summed(store, layer, calls, loss_mean)]
    simple = layer.form == "vectors" and len(maps) == 1 and one_slot_a_row(store, layer, segment)
    return Curvature(maps, _norms(store, layer, segment, maps[0]) if simple else None)


def _written(chunk: SlotChunk, block: int) -> int:
    """How many slots of a call wrote something."""
    count = int(chunk.counts[block])
    if chunk.silent is None:
        return count
    start = int(chunk.starts[block])
    return count - int(chunk.silent[start : start + count].sum())


def _rows(calls: Sequence[tuple[SlotChunk, int]]) -> int:
    """How many rows some calls have; one that serves all rows counts as one."""
    found = [(int(chunk.blocks[block, 3]), int(chunk.blocks[block, 4])) for chunk, block in calls]
    shared = sum(first == NO_ROW for first, _ in found)
    return shared + sum({first: count for first, count in found if first != NO_ROW}.values())


def _summed(store: Store, layer: Layer, calls: Sequence[tuple[SlotChunk, int]], loss_mean: LossMean) -> list[Sums]:
    dtype = torch.float64 if store.manifest.dtype == "float64" else torch.float32
    sums = [Sums(linear_map) for linear_map in linear_maps(layer)]
    for piece in _spread(calls):
        keys = piece.keys(dtype)
        errors = piece.errors(dtype)
        divisor = loss_mean.of_slots(piece.chunk, piece.low, piece.high, dtype)
        for one in sums:
            one.add(keys, errors, divisor, piece.written)
    return sums


def _norms(store: Store, layer: Layer, segment: Segment, factors: Factors) -> Tensor:
    """√(keyᵀ (A + αI)⁻¹ key) of each row, the constant included."""
    [linear_map] = linear_maps(layer)
    triangle = torch.linalg.cholesky(damped(factors.keys, DAMPING))[0].float()
    found = torch.zeros(segment.end_row - segment.first_row, dtype=torch.float32)
    for window in windows(store, segment.first_row, segment.end_row, ROWS):
        chunk = store.chunk_of(layer.name, window.place)
        for piece in [] if chunk is None else row_pieces(chunk, window.begin, window.end, layer.d_in):
            first = piece.first_row - segment.first_row
            keys = linear_map.with_constant(linear_map.key_side(piece.keys(torch.float32))[:, 0])[:, : len(triangle)]
            solved = torch.linalg.solve_triangular(triangle, keys.T, upper=False)
            found[first : first + piece.rows] = torch.linalg.vector_norm(solved, dim=0)
    return found


def _spread(calls: Sequence[tuple[SlotChunk, int]]) -> Iterator[RowPiece]:
    """Some rows of some calls: at most about SLOTS_TAKEN slots."""
    if not calls:
        return
    slots = float(np.mean([chunk.counts[block] for chunk, block in calls]))
    count = min(len(calls), max(STEPS_TAKEN, round(SLOTS_TAKEN / slots)))
    share = min(1.0, SLOTS_TAKEN / (count * slots))
    for place in np.linspace(0, len(calls) - 1, count).round().astype(int).tolist():
        chunk, block = calls[place]
        first = int(chunk.blocks[block, 3])
        rows = max(1, round(share * int(chunk.blocks[block, 4])))
        positions = int(chunk.blocks[block, 5])
        start = int(chunk.starts[block])
        yield RowPiece(chunk, start, start + rows * positions, positions, first)


def recorded_factors(store: Store, layer: Layer, segment: Segment, positions: float) -> list[Factors] | None:
    """The mean over the stretches between snapshots that a segment meets, by how much of them it meets.

    None: nothing was counted in most of it, or stretches are longer than the segment and would tell too little of it.
    """
    number, _ = store.layer(layer.name)
    weights = []
    files = []
    met = 0
    for begin, end in pairwise(store.snapshot_steps()):
        common = min(end, segment.end) - max(begin, segment.begin)
        if common <= 0:
            continue
        file = store.snapshot(end)
        if end - begin > segment.end - segment.begin:
            return None
        if f"curvature.{number}.slots" not in file:
            continue
        weights.append(common / (end - begin) * float(file[f"curvature.{number}.slots"]))
        files.append(file)
        met += common
    if 2 * met < segment.end - segment.begin or not sum(weights):
        return None
    shares = [weight / sum(weights) for weight in weights]

    def mean(name: str) -> torch.Tensor:
        parts = (share * file[name].double() for share, file in zip(shares, files, strict=True))
        return torch.stack(list(parts)).sum(0)

    return [
        Factors(mean(f"curvature.{number}.{n}.keys"), mean(f"curvature.{number}.{n}.errors"), positions)
        for n in range(len(linear_maps(layer)))
    ]


# What is kept


def _name(store: Store, layer: Layer, segment: Segment, mean: str) -> str:
    """The file's name says what it was built from: the slots, the segment, how many are taken, and the loss's mean."""
    chunks = [c for c in store.manifest.chunks if c.first_step < segment.end and c.end_step > segment.begin]
    content = [
        VERSION, asdict(layer), segment.begin, segment.end, SLOTS_TAKEN, STEPS_TAKEN, mean,
        [[c.first_step, c.end_step, c.files[SLOTS].checksum] for c in chunks],
    ]  # fmt: skip
    return f"curvature-{checksum(json.dumps(content).encode())}.safetensors"


def _kept(store: Store, layer: Layer, segment: Segment, name: str) -> Curvature | None:
    """What was kept under this name; None: nothing."""
    try:
        described = describe_file(store.files, name)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    file = TensorFile(store.files, name, described)
    expected = _shapes(layer)
    if "norms" in file:
        expected["norms"] = (segment.end_row - segment.first_row,)
    if {tensor: file.shape(tensor) for tensor in file} != expected:
        raise StoreDamagedError(
            f"{file.path} is damaged: its tensors are not of the expected shapes. Delete it: it is built again."
        )
    maps = [
        Factors(file[f"{n}.keys"], file[f"{n}.errors"], float(file[f"{n}.positions"]))
        for n in range(len(linear_maps(layer)))
    ]
    return Curvature(maps, file["norms"] if "norms" in file else None)


def _shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Of the tensors that are kept for a layer, without the norms."""
    found: dict[str, tuple[int, ...]] = {}
    for number, linear_map in enumerate(linear_maps(layer)):
        width = linear_map.width + bool(linear_map.constant)
        found[f"{number}.keys"] = (linear_map.width,) if linear_map.is_one_hot else (linear_map.groups, width, width)
        found[f"{number}.errors"] = (linear_map.groups, linear_map.outputs, linear_map.outputs)
        found[f"{number}.positions"] = (1,)
    return found
