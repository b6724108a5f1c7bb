"""The factors of a run: curvature of every linear map in every segment, from slots or as it was counted while recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dualform.curvature.loss_mean import RECORDED_MEAN, LossMean
from dualform.curvature.maps import linear_maps
from dualform.curvature.sums import DAMPING, Curvature, Factors, Sums, damped
from dualform.errors import NotRecordedError
from dualform.layers.layer import Layer
from dualform.progress import Progress, report
from dualform.query.influence.kept import file_name, keep, read_kept
from dualform.query.influence.rows import RowPiece
from dualform.query.influence.segments import Segment, blocks_in, evenly_spaced, one_slot_a_row, undecoded_pieces
from dualform.store.format import NO_ROW
from dualform.store.reader import Store

SLOTS_TAKEN = 16384
"""How many slots of a segment a layer's curvature is computed from, at steps spread over it."""
STEPS_TAKEN = 16
"""From at least this many steps, if there are as many."""
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
    """Return for each segment and layer the factors of the layer's maps: those kept beside the store, or built and then kept."""
    found: list[ByLayer] = [{} for _ in segments]
    work = [(by_layer, segment, layer) for by_layer, segment in zip(found, segments, strict=True) for layer in layers]
    for by_layer, segment, layer in report("curvature", work, progress):
        name = file_name(store, layer, segment, SLOTS_TAKEN, STEPS_TAKEN, loss_mean.mean)
        curvature = read_kept(store, layer, segment, name)
        if curvature is None:
            curvature = built_factors(store, layer, segment, loss_mean)
            keep(store.files, name, curvature)
        by_layer[layer.name] = curvature
    return found


def built_factors(store: Store, layer: Layer, segment: Segment, loss_mean: LossMean) -> Curvature:
    """Return the curvature as it was counted while recording, or from slots that are spread evenly over the segment."""
    calls: list[RowPiece] = []
    slots = 0
    for chunk, blocks in blocks_in(store, layer, segment):
        calls.extend(RowPiece.of_block(chunk, block) for block in blocks)
        slots += int(chunk.written_counts[blocks].sum())
    positions = slots / max(1, _rows_of(calls))
    maps = None
    is_summed = store.is_summed(layer.name)
    if loss_mean.mean == RECORDED_MEAN:
        maps = recorded_factors(store, layer, segment, positions, is_all_there_is=is_summed)
    if maps is None and is_summed:
        raise NotRecordedError(_why_no_curvature(layer, loss_mean))
    if maps is None:
        maps = [sums.factors(positions) for sums in _sum_slots(store, layer, calls, loss_mean)]
    norms = None
    if layer.form == "vectors" and len(maps) == 1 and one_slot_a_row(store, layer, segment):
        norms = _norms(store, layer, segment, maps[0])
    return Curvature(maps, norms)


def _why_no_curvature(layer: Layer, loss_mean: LossMean) -> str:
    if loss_mean.mean != RECORDED_MEAN:
        return (
            f"layer {layer.name!r} keeps the gradients of rows (keep={layer.keep!r}): its curvature was counted while recording, for a loss that is "
            f'a mean over {RECORDED_MEAN}. Leave loss_mean= out; or ask method="kernel" or "sketch", or record with keep="slots".'
        )
    return (
        f"layer {layer.name!r} keeps the gradients of rows (keep={layer.keep!r}), and its curvature was not counted while recording, so there is "
        f'nothing to whiten with. Record with curvature=True, or with keep="slots"; or ask method="kernel" or "sketch".'
    )


def _rows_of(calls: Sequence[RowPiece]) -> int:
    """Return how many rows some calls have; slots that serve all rows count as one."""
    shared = 0
    rows: dict[int, int] = {}
    for call in calls:
        if call.first_row == NO_ROW:
            shared += 1
        else:
            rows[call.first_row] = call.rows  # a layer that is called twice has the same rows
    return shared + sum(rows.values())


def _sum_slots(store: Store, layer: Layer, calls: Sequence[RowPiece], loss_mean: LossMean) -> list[Sums]:
    dtype = torch.float64 if store.manifest.dtype == "float64" else torch.float32
    by_map = [Sums(linear_map) for linear_map in linear_maps(layer)]
    for piece in _spread(calls):
        keys = piece.keys(dtype)
        errors = piece.errors(dtype)
        divisors = loss_mean.of_slots(piece.chunk, piece.low, piece.high, dtype)
        for sums in by_map:
            sums.add(keys, errors, divisors, piece.written)
    return by_map


def _spread(calls: Sequence[RowPiece]) -> Iterator[RowPiece]:
    """Return the first rows of some calls, spread evenly: at most about SLOTS_TAKEN slots."""
    if not calls:
        return
    mean_slots = float(np.mean([call.high - call.low for call in calls]))
    count = min(len(calls), max(STEPS_TAKEN, round(SLOTS_TAKEN / mean_slots)))
    share = min(1.0, SLOTS_TAKEN / (count * mean_slots))
    for place in evenly_spaced(0, len(calls) - 1, count):
        call = calls[place]
        rows = max(1, round(share * call.rows))
        yield call.part(call.first_row, call.first_row + rows)


def _norms(store: Store, layer: Layer, segment: Segment, factors: Factors) -> Tensor:
    """Return √(keyᵀ (A + αI)⁻¹ key) of each row, the constant included."""
    [linear_map] = linear_maps(layer)
    triangle = torch.linalg.cholesky(damped(factors.keys, DAMPING))[0].float()
    norms = torch.zeros(segment.rows, dtype=torch.float32)
    for window in segment.windows(store, ROWS):
        for piece in undecoded_pieces(store, layer, window, layer.d_in):
            keys = linear_map.key_side(piece.keys(torch.float32))[:, 0]
            extended = linear_map.with_constant(keys)[:, : len(triangle)]
            solved = torch.linalg.solve_triangular(triangle, extended.T, upper=False)
            norms[piece.places(segment.first_row)] = torch.linalg.vector_norm(solved, dim=0)
    return norms


def recorded_factors(
    store: Store,
    layer: Layer,
    segment: Segment,
    positions: float,
    *,
    is_all_there_is: bool = False,
) -> list[Factors] | None:
    """Return the mean over the stretches between snapshots that a segment meets, by how much of them it meets.

    None: nothing was counted in most of it, or stretches are longer than the segment and would tell too little of it. is_all_there_is:
    then what was counted in any part of it is taken all the same.
    """
    number, _ = store.layer(layer.name)
    slots = f"curvature.{number}.slots"
    length = segment.end - segment.begin
    weights = []
    files = []
    counted_steps = 0
    for begin, end in pairwise(store.snapshot_steps()):
        common_steps = min(end, segment.end) - max(begin, segment.begin)
        if common_steps <= 0:
            continue
        file = store.snapshot(end)
        if end - begin > length and not is_all_there_is:
            return None
        if slots in file:
            weights.append(common_steps / (end - begin) * float(file[slots]))
            files.append(file)
            counted_steps += common_steps
    is_enough = is_all_there_is or 2 * counted_steps >= length
    if is_all_there_is and not sum(weights):
        # Steps are counted now and then, and there may be none of them between two snapshots: the nearest stretch is taken
        nearest = sorted(store.snapshot_steps(), key=lambda step: abs(step - segment.end))
        files = [file for file in map(store.snapshot, nearest) if slots in file and file[slots] > 0][:1]
        weights = [1.0] * len(files)
    if not is_enough or not sum(weights):
        return None
    shares = [weight / sum(weights) for weight in weights]

    def mean(name: str) -> Tensor:
        parts = [share * file[name].double() for share, file in zip(shares, files, strict=True)]
        return torch.stack(parts).sum(0)

    found = []
    for place in range(len(linear_maps(layer))):
        keys = mean(f"curvature.{number}.{place}.keys")
        errors = mean(f"curvature.{number}.{place}.errors")
        found.append(Factors(keys, errors, positions))
    return found
