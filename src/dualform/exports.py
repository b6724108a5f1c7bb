"""Exports: the rows of a recording, and attention weights for query vectors from a file, as Parquet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import polars as pl
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dualform.errors import QuestionError
from dualform.progress import Progress
from dualform.query.conditions import Condition, read_condition
from dualform.query.dual import Dual
from dualform.query.slots import describe

READERS = (".npy", ".safetensors", ".parquet")
"""Kinds of files that query vectors are read from."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how many lines it has."""

    path: Path
    lines: int


def write_rows(dual: Dual, folder: Path, *, where: str | None = None) -> Exported:
    """The row table, with each row's number: `rows.parquet`.

    A condition on positions says nothing about whole rows, so it leaves them all in.
    """
    rows = dual.rows.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    if where is not None:
        Condition(dual.store, where, dual.end_step)  # its errors say what is wrong with the condition
        condition = read_condition(where, "where")
        if set(condition.meta.root_names()) <= _per_row(dual):
            rows = rows.filter(condition)
    path = folder / "rows.parquet"
    rows.write_parquet(path)
    return Exported(path, rows.height)


def write_top(
    dual: Dual, layer: str, queries: Tensor, folder: Path, *, k: int = 10, where: str | None = None
) -> Exported:
    """The k slots with the highest attention weights for each query: `attention-LAYER.parquet`."""
    top = dual.attend({layer: queries})[layer].top(k, where=where)
    path = folder / f"attention-{_file_name(layer)}.parquet"
    top.write_parquet(path)
    return Exported(path, top.height)


def write_all(
    dual: Dual,
    layer: str,
    queries: Tensor,
    folder: Path,
    *,
    where: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Every attention weight, a file for each stretch of slots: `attention-LAYER/part-000000.parquet`, …"""
    attention = dual.attend({layer: queries})[layer]
    stretches = attention.scores(where=where)
    path = folder / f"attention-{_file_name(layer)}"
    path.mkdir(exist_ok=True)
    for old in path.glob("part-*.parquet"):
        old.unlink()
    slots = dual.layer(layer).slots
    lines = 0
    for number, (numbers, weights) in enumerate(stretches):
        places = numbers.numpy()
        repeated = np.tile(places, weights.shape[:2].numel())
        part = _long(weights).with_columns(pl.Series("slot", repeated))
        columns = describe(dual.store, layer, places, dual.end_step)
        part = part.join(columns, on="slot", how="left", maintain_order="left")
        part.write_parquet(path / f"part-{number:06d}.parquet")
        lines += part.height
        if progress is not None:
            progress("exporting", int(numbers[-1]) + 1, slots)
    return Exported(path, lines)


def read_queries(path: Path, layer: str) -> Tensor:
    """Query vectors, (queries, d_in) or (queries, positions, d_in).

    .npy: one array. .safetensors: the tensor with the layer's name, or the only one. .parquet: a line for
    each query, in one column of lists or in one column for each feature.
    """
    if not path.is_file():
        raise QuestionError(f"there is no file {path} to read query vectors from.")
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".safetensors":
            return _from_safetensors(path, layer)
        if path.suffix == ".parquet":
            return _from_parquet(path)
    except (ValueError, TypeError, EOFError, SafetensorError, pl.exceptions.PolarsError) as error:
        if isinstance(error, QuestionError):
            raise
        raise QuestionError(f"{path} cannot be read as query vectors: {error}.") from None
    raise QuestionError(f"{path}: query vectors are read from {', '.join(READERS)} files, not from {path.suffix!r}.")


def read_inputs(path: Path, dual: Dual) -> Tensor | dict[str, Tensor]:
    """Test inputs, an entry each, in the type of the recording's weights; whole numbers stay whole.

    A .safetensors file with several tensors has the model's arguments by name: input_ids, attention_mask, …
    """
    dtype = getattr(torch, dual.store.manifest.parameters[0].dtype)
    if path.suffix == ".safetensors" and path.is_file():
        named = _all_tensors(path)
        if len(named) > 1:
            return {name: _in_type(tensor, dtype) for name, tensor in named.items()}
    return _in_type(read_queries(path, "inputs"), dtype)


def _in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _all_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise QuestionError(f"{path} cannot be read as test inputs: {error}.") from None


def _from_safetensors(path: Path, layer: str) -> Tensor:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        if layer not in names and len(names) != 1:
            raise QuestionError(f"{path} has no tensor {layer!r}, and several others: {', '.join(map(repr, names))}.")
        tensor: Tensor = file.get_tensor(layer if layer in names else names[0])
        return tensor


def _from_parquet(path: Path) -> Tensor:
    table = pl.read_parquet(path)
    if table.width == 1 and isinstance(table.dtypes[0], (pl.List, pl.Array)):
        return torch.tensor(table.to_series().to_list(), dtype=torch.float64)
    wrong = [name for name, kind in table.schema.items() if not kind.is_numeric()]
    if wrong:
        raise QuestionError(
            f"{path}: the columns {', '.join(map(repr, wrong))} are not numbers. Expected one column "
            f"of lists, or one column of numbers for each feature."
        )
    return torch.from_numpy(table.to_numpy(order="c").astype(np.float64))


def _per_row(dual: Dual) -> set[str]:
    """The names that a condition on whole rows may use."""
    return {name for name, kind in dual.rows.schema.items() if not isinstance(kind, pl.List)}


def _long(weights: Tensor) -> pl.DataFrame:
    """(queries, positions, slots) → one line for each weight."""
    shape = tuple(weights.shape)
    query, position, _ = np.indices(shape, sparse=True)
    return pl.DataFrame(
        {
            "query": np.broadcast_to(query, shape).reshape(-1),
            "position": np.broadcast_to(position, shape).reshape(-1),
            "weight": weights.reshape(-1).numpy(),
        }
    )


def _file_name(layer: str) -> str:
    """Layer names are the user's; a file name gets nothing that could lead elsewhere."""
    return quote(layer, safe="") or "root"
