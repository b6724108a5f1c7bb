"""Check that the parts of a manifest fit each other, and that the content of a chunk's files fits their label.

In a manifest, counts must add up, names exist and sizes be possible. In files, shapes of tensors and columns and steps of tables must be
those of the label, which has the counts at the time of writing (store/labels.py). Functions raise ValueError and say what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import polars as pl

from dualform.arrays import Ints
from dualform.layers.layer import COUNT_LIMIT, Geometry, Layer, Use, spans
from dualform.store.format import (
    BLOCK_FIELDS,
    CHUNK_FILES,
    DTYPES,
    KEEPS,
    MIXED,
    NO_ROW,
    ROWS,
    STEPS,
    SUM_FIELDS,
    SUMMED,
    SUMS,
    TABLES,
    TOTAL_KINDS,
    Chunk,
    Manifest,
    Parameter,
    Totals,
    groups_name,
    shortened,
)
from dualform.store.header import MAX_AXES, NAMES
from dualform.store.labels import Label
from dualform.store.tables import UPDATE_TYPES, row_types
from dualform.store.tensors import CheckedFile

Shape = tuple[int | None, ...]
"""None: any length."""

FORMS = ("vectors", "numbers", "maps", "parts")
ROLES = ("weight", "table", "bias", "scale")
MODES = ("zeros", "reflect", "replicate", "circular")
COLUMN_TYPES = ("Int64", "Float64", "String", "Boolean")
PER = ("row", "position")
ITEM_SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}

TABLE_BYTES = 1 << 30
TABLE_SHARE = 100
"""Tables may take a gigabyte of memory, or a hundred times the size of the store. A real store stays far below, since slots take more disk
than rows; a file of a megabyte that claims a hundred million lines does not."""
LINE_BYTES = 16


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError unless the parts of a manifest fit each other."""
    _require_one_of("keep", manifest.keep, (*KEEPS, MIXED))
    _require_one_of("dtype", manifest.dtype, tuple(DTYPES))
    nbytes = sum(file.size for _, file in manifest.files())
    _check_columns(manifest)
    _check_parameters(manifest, nbytes)
    _check_layers(manifest)
    _check_sessions(manifest)
    _check_chunks(manifest)
    _check_snapshots(manifest)
    if manifest.totals is not None:
        _check_totals(manifest, manifest.totals)
    if manifest.every < 1:
        raise ValueError(f"every is {manifest.every}; expected at least 1")
    lines = sum(file.lines or 0 for _, file in manifest.files())
    if LINE_BYTES * lines > table_limit(nbytes):
        raise ValueError(f"its tables have {lines:,} lines, which {nbytes:,} bytes cannot hold")


def table_limit(nbytes: int) -> int:
    """Return how much memory the tables of a store of this size may take."""
    return max(TABLE_BYTES, TABLE_SHARE * nbytes)


def _check_columns(manifest: Manifest) -> None:
    _require_distinct("columns", ["step", *(column.name for column in manifest.columns)])
    for column in manifest.columns:
        _require_one_of(f"the type of column {column.name!r}", column.type, COLUMN_TYPES)
        _require_one_of(f"per of column {column.name!r}", column.per, PER)


def _check_parameters(manifest: Manifest, nbytes: int) -> None:
    _require_distinct("parameters", [parameter.name for parameter in manifest.parameters])
    for parameter in manifest.parameters:
        _require_one_of(f"the type of {parameter.name!r}", parameter.dtype, tuple(ITEM_SIZES))
        size = math.prod(parameter.shape[:MAX_AXES]) * ITEM_SIZES[parameter.dtype]
        # Snapshots hold all parameters, so none is larger than the store
        if len(parameter.shape) > MAX_AXES or size > nbytes:
            raise ValueError(
                f"parameter {parameter.name!r} of shape {shortened(parameter.shape)} is larger than the whole store"
            )


def _check_layers(manifest: Manifest) -> None:
    parameters = {parameter.name: parameter for parameter in manifest.parameters}
    _require_distinct("layers", [layer.name for layer in manifest.layers])
    for layer in manifest.layers:
        _check_kept(layer, manifest)
        _check_layer(layer.in_network, parameters)
    if any(axis >= MAX_AXES for axis in manifest.batch_axis.values()):
        raise ValueError(f"batch_axis names an axis that no tensor has: {shortened(manifest.batch_axis)}")


def _check_kept(layer: Layer, manifest: Manifest) -> None:
    """A layer keeps what the manifest says, and is projected as its own seed says."""
    _require_one_of(f"keep of layer {layer.name!r}", layer.keep, KEEPS)
    if layer.keep != manifest.keep and manifest.keep != MIXED:
        raise ValueError(f"layer {layer.name!r} keeps {layer.keep!r}, and the store {manifest.keep!r}")
    origin = layer.projected_from
    if origin is None:
        return
    if origin.size < 1 or origin.layer.projected_from is not None or layer.keep != "projected":
        raise ValueError(f"layer {layer.name!r} is projected in a way that there is not")
    # Imported here, for it needs PyTorch: `dualform passages` opens stores without
    from dualform.layers.projected import projected_layer

    if projected_layer(origin.layer, origin.size, origin.seed) != layer:
        raise ValueError(f"layer {layer.name!r} is not what its projection makes of it")


def _check_layer(layer: Layer, parameters: dict[str, Parameter]) -> None:
    where = f"layer {layer.name!r}"
    _require_one_of(f"the form of {where}", layer.form, FORMS)
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
    _require_one_of(f"the padding mode of {where}", geometry.mode, MODES)
    axes = len(geometry.kernel)
    lengths = [len(geometry.stride), len(geometry.dilation), len(geometry.padding) / 2]
    positive = [geometry.channels, *geometry.kernel, *geometry.stride, *geometry.dilation]
    if axes > 3 or any(length != axes for length in lengths) or min(positive) < 1 or geometry.patch != d_in:
        raise ValueError(f"the geometry of {where} does not fit its {d_in} inputs")


def _check_use(where: str, use: Use, layer: Layer, parameter: Parameter) -> None:
    """Require that key ⊗ error signal has the shape of the parameter, or of some rows of its first axis."""
    _require_one_of(f"the role of {use.parameter!r} in {where}", use.role, ROLES)
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
        raise ValueError(f"{use.parameter!r} of shape {shortened(parameter.shape)} does not fit {where}")


def _width(ranges: Sequence[int], whole: int) -> int:
    """Return how many columns the ranges (begin, end, begin, end, …) have together; without ranges, all."""
    if not ranges:
        return whole
    is_inside = len(ranges) % 2 == 0 and all(begin <= end <= whole for begin, end in spans(ranges))
    if not is_inside:
        raise ValueError(f"the ranges {shortened(ranges)} do not lie within {whole} columns")
    return sum(end - begin for begin, end in spans(ranges))


def _check_sessions(manifest: Manifest) -> None:
    steps = [session.first_step for session in manifest.sessions]
    _require_distinct("sessions", [session.name for session in manifest.sessions])
    if steps[:1] != [0] or steps != sorted(steps) or steps[-1] > manifest.end_step:
        raise ValueError(
            f"its sessions begin at steps {shortened(steps)}; expected 0 and later ones, up to {manifest.end_step}"
        )


def _check_chunks(manifest: Manifest) -> None:
    if manifest.keep == "totals" and manifest.chunks:
        raise ValueError('it keeps "totals", but has chunks')
    step = 0
    row = 0
    for number, chunk in enumerate(manifest.chunks):
        where = f"chunk {number}"
        _check_chunk_files(where, chunk, layers=len(manifest.layers))
        if chunk.first_step != step or chunk.end_step <= step:
            raise ValueError(
                f"{where} has steps {chunk.first_step} to {chunk.end_step}; expected them to begin at {step}"
            )
        if chunk.first_row != row:
            raise ValueError(f"{where} begins with row {chunk.first_row}; there are {row} before it")
        _check_chunk_lines(where, chunk)
        step = chunk.end_step
        row += chunk.rows
    slots = sum(sum(chunk.slots) for chunk in manifest.chunks)
    keys = sum(sum(chunk.keys) for chunk in manifest.chunks)
    if max(row, slots, keys) >= COUNT_LIMIT:
        raise ValueError("its chunks have more rows, slots or keys than can be counted")


def _check_chunk_files(where: str, chunk: Chunk, *, layers: int) -> None:
    has_counts = len(chunk.slots) == len(chunk.keys) == layers
    if chunk.files.keys() != set(CHUNK_FILES) or not has_counts or chunk.shard:
        raise ValueError(f"{where} is not as expected")
    for name in CHUNK_FILES:
        if (name in TABLES) != (chunk.files[name].lines is not None):
            raise ValueError(f"{where} is not as expected: {name} has lines, or none")


def _check_chunk_lines(where: str, chunk: Chunk) -> None:
    if (chunk.files[ROWS].lines or 0) < chunk.rows:
        raise ValueError(f"{where} has {chunk.rows} rows; its table has {chunk.files[ROWS].lines}")
    if (chunk.files[STEPS].lines or 0) < chunk.end_step - chunk.first_step:
        raise ValueError(f"{where} has fewer lines than steps")


def _check_snapshots(manifest: Manifest) -> None:
    steps = [snapshot.step for snapshot in manifest.snapshots]
    _require_distinct("snapshots", steps)
    if 0 not in steps:
        raise ValueError("there is no snapshot of the weights that training began with")
    if max(steps) > manifest.end_step:
        raise ValueError(f"there is a snapshot of step {max(steps)}, but only {manifest.end_step} steps are sealed")
    if any(snapshot.file.lines is not None for snapshot in manifest.snapshots):
        raise ValueError("a snapshot has lines")


def _check_totals(manifest: Manifest, totals: Totals) -> None:
    tables = [groups_name(number) for number in range(len(totals.groupings))]
    if totals.files.keys() != {SUMS, *tables}:
        raise ValueError("its totals are not as expected")
    if any((name == SUMS) != (file.lines is None) for name, file in totals.files.items()):
        raise ValueError("its totals are not as expected: a file has lines, or none")
    if totals.step > manifest.end_step:
        raise ValueError(f"its totals are of {totals.step} steps, but only {manifest.end_step} are sealed")
    columns = {column.name for column in manifest.columns}
    for grouping in totals.groupings:
        _require_one_of("the kind of totals", grouping.kind, TOTAL_KINDS)
        if not grouping.columns or not columns.issuperset(grouping.columns):
            raise ValueError(f"there are totals by {shortened(grouping.columns)}, but no such columns")


def _require_one_of(what: str, found: str, allowed: Sequence[str]) -> None:
    if found not in allowed:
        raise ValueError(f"{what} is {shortened(found)}; expected one of {', '.join(map(repr, allowed))}")


def _require_distinct(what: str, names: Collection[object]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"two of its {what} are called the same")


# The content of files


def check_tensors(file: CheckedFile[Any], manifest: Manifest, label: Label) -> None:
    """Raise ValueError unless the tensors of a chunk's slots have the shapes that its counts say."""
    for number, slots in enumerate(label["slots"]):
        if slots:
            _check_layer_tensors(file, manifest, number, slots, label["keys"][number])
    for name in file:
        if name.startswith("gradient."):
            _check_gradient(file, manifest, name)


def _check_layer_tensors(file: CheckedFile[Any], manifest: Manifest, number: int, slots: int, keys: int) -> None:
    layer = manifest.layers[number]
    _require_tensor(file, f"{number}.blocks", "I64", (None, len(BLOCK_FIELDS)))
    if f"{number}.silent" in file:
        _require_tensor(file, f"{number}.silent", "BOOL", (slots,))
    slots -= _check_gradients(file, manifest, number)
    if layer.keep != "keys" and slots:
        _require_tensor(file, f"{number}.errors", _stored_type(manifest), (slots, layer.kept_outputs))
        _check_exponents(file, manifest, f"{number}.error_exponents", slots)
    if layer.form == "numbers":
        _require_tensor(file, f"{number}.keys", "I32", (slots, 1))
    else:
        _check_keys(file, manifest, number, slots, keys)


def _check_gradients(file: CheckedFile[Any], manifest: Manifest, number: int) -> int:
    """Check the gradients of rows whose slots were summed; return how many there are."""
    sums = f"{number}.sums"
    gradients = f"{number}.gradients"
    if sums not in file and gradients not in file:
        return 0
    if manifest.layers[number].keep not in SUMMED:
        raise ValueError(f"it has the gradients of rows, but keeps {manifest.layers[number].keep!r}")
    blocks = file.shape(f"{number}.blocks")[0]
    _require_tensor(file, sums, "I64", (blocks, len(SUM_FIELDS)))
    if gradients not in file:
        return 0
    _require_tensor(file, gradients, _stored_type(manifest), (None, manifest.layers[number].gradient_size))
    count = file.shape(gradients)[0]
    _check_exponents(file, manifest, f"{number}.gradient_exponents", count)
    return count


def _check_keys(file: CheckedFile[Any], manifest: Manifest, number: int, slots: int, keys: int) -> None:
    """Check keys that are vectors or feature maps. Equal keys may be stored once."""
    layer = manifest.layers[number]
    if f"{number}.key_numbers" in file and slots:
        _require_tensor(file, f"{number}.key_numbers", "I64", (slots,))
    elif layer.form != "maps" and keys != slots:
        raise ValueError(f"layer {layer.name!r} has {slots} slots and {keys} keys, but does not say whose they are")
    if keys:
        shape = (None,) if layer.form == "maps" else (keys, layer.d_in)
        _require_tensor(file, f"{number}.keys", _stored_type(manifest), shape)
        _check_exponents(file, manifest, f"{number}.key_exponents", keys)
    if layer.geometry is not None:
        blocks = file.shape(f"{number}.blocks")[0]
        _require_tensor(file, f"{number}.shapes", "I64", (blocks, 1 + len(layer.geometry.kernel)))


def _stored_type(manifest: Manifest) -> str:
    """Return the type of stored vectors, as headers call it."""
    return NAMES[DTYPES[manifest.dtype]]


def _check_exponents(file: CheckedFile[Any], manifest: Manifest, name: str, count: int) -> None:
    if manifest.dtype == "float16":
        _require_tensor(file, name, "I16", (count,))
    elif name in file:
        raise ValueError(f"there are powers of two, {name!r}, for vectors of {manifest.dtype}")


def _check_gradient(file: CheckedFile[Any], manifest: Manifest, name: str) -> None:
    number = name.removeprefix("gradient.")
    if not number.isdecimal() or int(number) >= len(manifest.parameters):
        raise ValueError(f"{name!r} is of a parameter that is not there")
    _require_tensor(file, name, file.dtype(name), (None, *manifest.parameters[int(number)].shape))


def _require_tensor(file: CheckedFile[Any], name: str, dtype: str, shape: Shape) -> None:
    if name not in file:
        raise ValueError(f"it has no tensor {name!r}")
    actual = file.shape(name)
    fits = len(actual) == len(shape) and all(e is None or e == f for f, e in zip(actual, shape, strict=True))
    if not fits or file.dtype(name) != dtype:
        raise ValueError(f"{name!r} is {file.dtype(name)} {list(actual)}, expected {dtype} {list(shape)}")


def check_blocks(table: Ints, layer: Layer, slots: int, label: Label, manifest: Manifest) -> None:
    """Raise ValueError if the blocks of a layer, (blocks, 7), name steps or rows that are not in the chunk. slots: how many the layer has."""
    if manifest.every > 1 and not all(map(manifest.keeps_step, np.unique(table[:, 0]).tolist())):
        raise ValueError(f"the blocks of {layer.name!r} name steps whose slots were not to be kept")
    if len(table) and not (_are_steps(table, label) and _are_rows(table, slots, label)):
        raise ValueError(f"the blocks of {layer.name!r} name steps or rows that are not in the chunk")


def check_sums(table: Ints, blocks: Ints, layer: Layer) -> None:
    """Raise ValueError if the table of summed slots (blocks, 3) does not fit the blocks (blocks, 7) of a layer."""
    is_gradient, positions, written = table.T
    stored = blocks[:, 5]
    fits = np.isin(is_gradient, (0, 1)) & (positions >= 0) & (written >= 0) & (written < COUNT_LIMIT)
    fits &= (stored == 1) | (is_gradient == 0)
    if not fits.all():
        raise ValueError(f"what is said of the summed slots of {layer.name!r} does not fit its blocks")


def _are_steps(table: Ints, label: Label) -> bool:
    steps, backward, call = table[:, :3].T
    is_ordered = bool((steps[1:] >= steps[:-1]).all())
    is_inside = label["first_step"] <= int(steps[0]) and int(steps[-1]) < label["end_step"]
    return is_ordered and is_inside and int(backward.min()) >= 0 and int(call.min()) >= 0


def _are_rows(table: Ints, slots: int, label: Label) -> bool:
    first_row, rows, positions = table[:, 3:6].T
    end_row = label["first_row"] + label["rows"]
    if int(rows.min()) < 0 or int(positions.min()) < 0:
        return False
    # Each number is checked before any are added or multiplied, so that nothing overflows
    if int(rows.max()) > max(end_row, 1) or int(positions[rows > 0].max(initial=0)) > slots:
        return False
    if int(first_row.min()) < NO_ROW or int(first_row.max()) > end_row:
        return False
    return bool(int((first_row + rows).max()) <= end_row)


def check_table(name: str, table: pl.DataFrame, manifest: Manifest, label: Label, optimizers: Collection[str]) -> None:
    """Raise ValueError unless a table of a chunk has the columns of the manifest, and the steps of its label.

    optimizers: those that an update may name.
    """
    if name == ROWS:
        _require_row_columns(table, manifest)
        lines = label["rows"]
    elif name == STEPS:
        _require_columns(table, {"step": pl.Int64()})
        lines = label["end_step"] - label["first_step"]
    else:
        _require_columns(table, UPDATE_TYPES)
        _check_updates(table, manifest, optimizers)
        lines = table.height
    if table.height != lines:
        raise ValueError(f"it has {table.height:,} lines, expected {lines:,}")
    _check_steps(table["step"], label, every=name == STEPS)


def _require_row_columns(table: pl.DataFrame, manifest: Manifest) -> None:
    types = dict(table.schema)
    if not table.height and types == {"step": pl.Int64()}:
        return  # columns are not known before the first row
    if types != row_types(manifest.columns):
        raise ValueError("its columns are not those of the manifest")


def _require_columns(table: pl.DataFrame, expected: dict[str, pl.DataType]) -> None:
    """Require these columns. All others (settings of optimizers, what log() was given) must be numbers."""
    types = dict(table.schema)
    for name, kind in expected.items():
        if types.pop(name, None) != kind:
            raise ValueError(f"its column {name!r} is missing or of another type than {kind}")
    others = [name for name, kind in types.items() if kind != pl.Float64()]
    if others:
        raise ValueError(f"it has columns that are not expected: {', '.join(others)}")


def _check_steps(steps: pl.Series, label: Label, *, every: bool) -> None:
    if not len(steps):
        return
    if steps.null_count() or not steps.is_sorted():
        raise ValueError("its steps are not in order")
    if steps[0] < label["first_step"] or steps[-1] >= label["end_step"]:
        raise ValueError("it has steps that are not in the chunk")
    if every and steps.n_unique() != len(steps):
        raise ValueError("it has a step twice")


def _check_updates(table: pl.DataFrame, manifest: Manifest, optimizers: Collection[str]) -> None:
    numbers = table["parameter"]
    if numbers.null_count() or table["gradient_kept"].null_count() or table["factors"].null_count():
        raise ValueError("it has updates without a parameter")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(manifest.parameters):  # type: ignore[arg-type]
        raise ValueError("it has updates of parameters that are not there")
    # Optimizers that cannot be replayed are there by the names of their classes, without settings
    unknown = table.filter(~pl.col("optimizer").is_in(list(optimizers)) | pl.col("optimizer").is_null())
    if unknown.height and "lr" in table.columns and unknown["lr"].count():
        names = unknown["optimizer"].unique()
        raise ValueError(f"it has updates of unknown optimizers: {', '.join(map(str, names))}")
