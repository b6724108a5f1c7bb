"""Whether the content of a chunk's files fits what their label says: shapes of tensors, columns and steps of tables.

The label has the counts as they were written (see store/labels.py). Functions raise ValueError, which says what does not fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from dualform.layers.streams import Layer
from dualform.recursions import KINDS
from dualform.store.checked import CheckedFile
from dualform.store.format import BLOCK_FIELDS, NO_ROW, ROWS, STEPS, Manifest
from dualform.store.labels import Label
from dualform.store.schema import UPDATE_TYPES, schema
from dualform.store.tensor_writer import NAMES

Ints = np.ndarray[Any, np.dtype[np.int64]]
Shape = tuple[int | None, ...]
"""None: any length."""


def check_tensors(file: CheckedFile[Any], manifest: Manifest, label: Label) -> None:
    """Whether the tensors of a chunk's slots have the shapes that its counts say."""
    for number, slots in enumerate(label["slots"]):
        if slots:
            _check_layer(file, manifest, number, slots, label["keys"][number])
    for name in file:
        if name.startswith("gradient."):
            _check_gradient(file, manifest, name)


def _check_layer(file: CheckedFile[Any], manifest: Manifest, number: int, slots: int, keys: int) -> None:
    layer = manifest.layers[number]
    stored = NAMES[manifest.dtype]
    _require(file, f"{number}.blocks", "I64", (None, len(BLOCK_FIELDS)))
    if f"{number}.silent" in file:
        _require(file, f"{number}.silent", "BOOL", (slots,))
    if manifest.keep != "keys":
        _require(file, f"{number}.errors", stored, (slots, len(layer.outputs) or layer.d_out))
        _check_exponents(file, manifest, f"{number}.error_exponents", slots)
    if layer.form == "numbers":
        _require(file, f"{number}.keys", "I32", (slots, 1))
        return
    if f"{number}.key_numbers" in file:
        _require(file, f"{number}.key_numbers", "I64", (slots,))
    elif layer.form != "maps" and keys != slots:
        raise ValueError(f"layer {layer.name!r} has {slots} slots and {keys} keys, but does not say whose they are")
    if keys:
        _require(file, f"{number}.keys", stored, (None,) if layer.form == "maps" else (keys, layer.d_in))
        _check_exponents(file, manifest, f"{number}.key_exponents", keys)
    if layer.geometry is not None:
        blocks = file.shape(f"{number}.blocks")[0]
        _require(file, f"{number}.shapes", "I64", (blocks, 1 + len(layer.geometry.kernel)))


def _check_exponents(file: CheckedFile[Any], manifest: Manifest, name: str, count: int) -> None:
    if manifest.dtype == "float16":
        _require(file, name, "I16", (count,))
    elif name in file:
        raise ValueError(f"there are powers of two, {name!r}, for vectors of {manifest.dtype}")


def _check_gradient(file: CheckedFile[Any], manifest: Manifest, name: str) -> None:
    number = name.removeprefix("gradient.")
    if not number.isdecimal() or int(number) >= len(manifest.parameters):
        raise ValueError(f"{name!r} is of a parameter that is not there")
    _require(file, name, file.dtype(name), (None, *manifest.parameters[int(number)].shape))


def _require(file: CheckedFile[Any], name: str, dtype: str, shape: Shape) -> None:
    if name not in file:
        raise ValueError(f"it has no tensor {name!r}")
    found = file.shape(name)
    fits = len(found) == len(shape) and all(e is None or e == f for f, e in zip(found, shape, strict=True))
    if not fits or file.dtype(name) != dtype:
        raise ValueError(f"{name!r} is {file.dtype(name)} {list(found)}, expected {dtype} {list(shape)}")


def check_blocks(table: Ints, layer: Layer, slots: int, label: Label) -> None:
    """Whether the blocks of a layer, (blocks, 7), name only steps and rows that there are. slots: how many the layer has."""
    if not len(table):
        return
    steps, backward, call, first_row, rows, positions = table[:, :6].T
    end_row = label["first_row"] + label["rows"]
    ordered = bool((steps[1:] >= steps[:-1]).all())
    inside = label["first_step"] <= int(steps[0]) and int(steps[-1]) < label["end_step"]
    counts = all(int(column.min()) >= 0 for column in (backward, call, rows, positions))
    # Bounded before they are added and multiplied, so that nothing overflows
    bounded = int(rows.max()) <= max(end_row, 1) and int(positions[rows > 0].max(initial=0)) <= slots
    first_rows = int(first_row.min()) >= NO_ROW and int(first_row.max()) <= end_row
    known = ordered and inside and counts and bounded and first_rows
    if not known or int((first_row + rows).max()) > end_row:
        raise ValueError(f"the blocks of {layer.name!r} name steps or rows that are not in the chunk")


def check_table(name: str, table: pl.DataFrame, manifest: Manifest, label: Label) -> None:
    """Whether a table of a chunk has the columns of the manifest, and the steps of its label."""
    if name == ROWS:
        _require_row_columns(table, manifest)
        lines = label["rows"]
    elif name == STEPS:
        _require_columns(table, {"step": pl.Int64()})
        lines = label["end_step"] - label["first_step"]
    else:
        _require_columns(table, UPDATE_TYPES)
        _check_updates(table, manifest)
        lines = table.height
    if table.height != lines:
        raise ValueError(f"it has {table.height:,} lines, expected {lines:,}")
    _check_steps(table["step"], label, every=name == STEPS)


def _require_row_columns(table: pl.DataFrame, manifest: Manifest) -> None:
    found = dict(table.schema)
    if not table.height and found == {"step": pl.Int64()}:
        return  # columns are not known before the first row
    if found != schema(manifest.columns):
        raise ValueError("its columns are not those of the manifest")


def _require_columns(table: pl.DataFrame, expected: dict[str, pl.DataType]) -> None:
    """The columns that must be there; the others, settings of optimizers and what log() was given, are numbers."""
    found = dict(table.schema)
    for name, kind in expected.items():
        if found.pop(name, None) != kind:
            raise ValueError(f"its column {name!r} is missing or of another type than {kind}")
    others = [name for name, kind in found.items() if kind != pl.Float64()]
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


def _check_updates(table: pl.DataFrame, manifest: Manifest) -> None:
    numbers = table["parameter"]
    if numbers.null_count() or table["gradient_kept"].null_count() or table["factors"].null_count():
        raise ValueError("it has updates without a parameter")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(manifest.parameters):  # type: ignore[arg-type]
        raise ValueError("it has updates of parameters that are not there")
    unknown = set(table["optimizer"].unique()) - set(KINDS)
    if unknown and manifest.keep != "keys":  # keys alone can be kept under any optimizer
        raise ValueError(f"it has updates of unknown optimizers: {', '.join(map(str, unknown))}")
