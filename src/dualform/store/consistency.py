"""Whether the parts of a manifest fit each other: counts add up, names exist, sizes are possible. Nothing but the manifest is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from dualform.layers.streams import Geometry, Layer, Use
from dualform.store.format import (
    CHUNK_FILES,
    DTYPES,
    KEEPS,
    MOST,
    ROWS,
    STEPS,
    SUMS,
    TABLES,
    Manifest,
    Parameter,
    groups_name,
)

FORMS = ("vectors", "numbers", "maps", "parts")
ROLES = ("weight", "table", "bias", "scale")
MODES = ("zeros", "reflect", "replicate", "circular")
TOTAL_KINDS = ("keys", "deltas", "both")
COLUMN_TYPES = ("Int64", "Float64", "String", "Boolean")
PER = ("row", "position")
AXES = 32
"""Axes of a tensor, at most."""
ITEM_SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}

TABLE_BYTES = 1 << 30
TABLE_SHARE = 100
"""Tables may take a gigabyte of memory, or a hundred times the size of the store. Slots take more disk than rows, so an honest store stays
far below; a file of a megabyte that claims a hundred million lines does not."""
LINE_BYTES = 16


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError, which says what does not fit."""
    _one_of("keep", manifest.keep, KEEPS)
    _one_of("dtype", manifest.dtype, DTYPES)
    nbytes = sum(file.size for _, file in manifest.files())
    _check_columns(manifest)
    parameters = {parameter.name: parameter for parameter in manifest.parameters}
    _distinct("parameters", [parameter.name for parameter in manifest.parameters])
    for parameter in manifest.parameters:
        _check_parameter(parameter, nbytes)
    _distinct("layers", [layer.name for layer in manifest.layers])
    for layer in manifest.layers:
        _check_layer(layer, parameters)
    if any(axis >= AXES for axis in manifest.batch_axis.values()):
        raise ValueError(f"batch_axis names an axis that no tensor has: {_short(manifest.batch_axis)}")
    _check_sessions(manifest)
    _check_chunks(manifest)
    _check_snapshots(manifest)
    _check_totals(manifest)
    lines = sum(file.lines or 0 for _, file in manifest.files())
    if LINE_BYTES * lines > table_limit(nbytes):
        raise ValueError(f"its tables have {lines:,} lines, which {nbytes:,} bytes cannot hold")


def table_limit(nbytes: int) -> int:
    """How much memory the tables of a store of this size may take."""
    return max(TABLE_BYTES, TABLE_SHARE * nbytes)


def _check_columns(manifest: Manifest) -> None:
    _distinct("columns", ["step", *(column.name for column in manifest.columns)])
    for column in manifest.columns:
        _one_of(f"the type of column {column.name!r}", column.type, COLUMN_TYPES)
        _one_of(f"per of column {column.name!r}", column.per, PER)


def _check_parameter(parameter: Parameter, nbytes: int) -> None:
    _one_of(f"the type of {parameter.name!r}", parameter.dtype, tuple(ITEM_SIZES))
    size = math.prod(parameter.shape[:AXES]) * ITEM_SIZES[parameter.dtype]
    # Snapshots hold all parameters, so none is larger than the store
    if len(parameter.shape) > AXES or size > nbytes:
        raise ValueError(
            f"parameter {parameter.name!r} of shape {_short(parameter.shape)} is larger than the whole store"
        )


def _check_layer(layer: Layer, parameters: dict[str, Parameter]) -> None:
    where = f"layer {layer.name!r}"
    _one_of(f"the form of {where}", layer.form, FORMS)
    if not layer.uses:
        raise ValueError(f"{where} uses no parameter")
    if (layer.form == "maps") != (layer.geometry is not None):
        raise ValueError(f"{where} has feature maps or their geometry, but not both")
    if layer.geometry is not None:
        _check_geometry(where, layer.geometry, layer.d_in)
    if any(unit >= layer.d_out for unit in layer.outputs) or list(layer.outputs) != sorted(set(layer.outputs)):
        raise ValueError(f"the kept outputs of {where} are not among its {layer.d_out} outputs")
    for use in layer.uses:
        if use.parameter not in parameters:
            raise ValueError(f"{where} uses a parameter {use.parameter!r} that is not there")
        _check_use(where, use, layer, parameters[use.parameter])


def _check_geometry(where: str, geometry: Geometry, d_in: int) -> None:
    _one_of(f"the padding mode of {where}", geometry.mode, MODES)
    axes = len(geometry.kernel)
    lengths = [len(geometry.stride), len(geometry.dilation), len(geometry.padding) / 2]
    positive = [geometry.channels, *geometry.kernel, *geometry.stride, *geometry.dilation]
    if axes > 3 or any(length != axes for length in lengths) or min(positive) < 1 or geometry.patch != d_in:
        raise ValueError(f"the geometry of {where} does not fit its {d_in} inputs")


def _check_use(where: str, use: Use, layer: Layer, parameter: Parameter) -> None:
    """Keys and error signals must make a gradient of the parameter's shape, or of some rows of its first axis."""
    _one_of(f"the role of {use.parameter!r} in {where}", use.role, ROLES)
    rows = _width(use.rows, parameter.shape[0] if parameter.shape else 1)
    rest = math.prod(parameter.shape[1:])
    keys = _width(use.keys, layer.d_in)
    errors = _width(use.errors, layer.d_out)
    groups = max(1, use.groups)
    fits = {
        "weight": rows == errors and groups * rest == keys and errors % groups == 0,
        "table": rows == keys and rest == errors,
        "bias": rows * rest == errors,
        "scale": rows * rest == keys,
    }[use.role]
    if not fits or use.groups < 1:
        raise ValueError(f"{use.parameter!r} of shape {_short(parameter.shape)} does not fit {where}")


def _width(ranges: Sequence[int], whole: int) -> int:
    """How many columns some ranges (begin, end, begin, end, …) have together; all, if there are none."""
    if not ranges:
        return whole
    begins, ends = ranges[::2], ranges[1::2]
    if len(begins) != len(ends) or any(not b <= e <= whole for b, e in zip(begins, ends, strict=True)):
        raise ValueError(f"the ranges {_short(ranges)} do not lie within {whole} columns")
    return sum(ends) - sum(begins)


def _check_sessions(manifest: Manifest) -> None:
    steps = [session.first_step for session in manifest.sessions]
    _distinct("sessions", [session.name for session in manifest.sessions])
    if steps[:1] != [0] or steps != sorted(steps) or steps[-1] > manifest.end_step:
        raise ValueError(
            f"its sessions begin at steps {_short(steps)}; expected 0 and later ones, up to {manifest.end_step}"
        )


def _check_chunks(manifest: Manifest) -> None:
    if manifest.keep == "totals" and manifest.chunks:
        raise ValueError('it keeps "totals", but has chunks')
    layers = len(manifest.layers)
    step = row = slots = keys = 0
    for number, chunk in enumerate(manifest.chunks):
        where = f"chunk {number}"
        if chunk.files.keys() != set(CHUNK_FILES) or not len(chunk.slots) == len(chunk.keys) == layers or chunk.shard:
            raise ValueError(f"{where} is not as expected")
        for name in CHUNK_FILES:
            if (name in TABLES) != (chunk.files[name].lines is not None):
                raise ValueError(f"{where} is not as expected: {name} has lines, or none")
        if chunk.first_step != step or chunk.end_step <= step:
            raise ValueError(
                f"{where} has steps {chunk.first_step} to {chunk.end_step}; expected them to begin at {step}"
            )
        if chunk.first_row != row:
            raise ValueError(f"{where} begins with row {chunk.first_row}; there are {row} before it")
        if (chunk.files[ROWS].lines or 0) < chunk.rows:
            raise ValueError(f"{where} has {chunk.rows} rows; its table has {chunk.files[ROWS].lines}")
        if (chunk.files[STEPS].lines or 0) < chunk.end_step - chunk.first_step:
            raise ValueError(f"{where} has fewer lines than steps")
        step, row = chunk.end_step, row + chunk.rows
        slots, keys = slots + sum(chunk.slots), keys + sum(chunk.keys)
    if max(row, slots, keys) >= MOST:
        raise ValueError("its chunks have more rows, slots or keys than can be counted")


def _check_snapshots(manifest: Manifest) -> None:
    steps = [snapshot.step for snapshot in manifest.snapshots]
    _distinct("snapshots", steps)
    if 0 not in steps:
        raise ValueError("there is no snapshot of the weights that training began with")
    if max(steps) > manifest.end_step:
        raise ValueError(f"there is a snapshot of step {max(steps)}, but only {manifest.end_step} steps are sealed")
    if any(snapshot.file.lines is not None for snapshot in manifest.snapshots):
        raise ValueError("a snapshot has lines")


def _check_totals(manifest: Manifest) -> None:
    totals = manifest.totals
    if totals is None:
        return
    names = {column.name for column in manifest.columns}
    expected = {SUMS, *(groups_name(number) for number in range(len(totals.groupings)))}
    if totals.files.keys() != expected:
        raise ValueError("its totals are not as expected")
    if any((name == SUMS) != (file.lines is None) for name, file in totals.files.items()):
        raise ValueError("its totals are not as expected: a file has lines, or none")
    if totals.step > manifest.end_step:
        raise ValueError(f"its totals are of {totals.step} steps, but only {manifest.end_step} are sealed")
    for grouping in totals.groupings:
        _one_of("the kind of totals", grouping.kind, TOTAL_KINDS)
        unknown = [name for name in grouping.columns if name not in names]
        if unknown or not grouping.columns:
            raise ValueError(f"there are totals by {_short(grouping.columns)}, but no such columns")


def _one_of(what: str, found: str, allowed: Sequence[str]) -> None:
    if found not in allowed:
        raise ValueError(f"{what} is {_short(found)}; expected one of {', '.join(map(repr, allowed))}")


def _distinct(what: str, names: Collection[object]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"two of its {what} are called the same")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
