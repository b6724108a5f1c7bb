"""What a data loader yields, read as rows: how many there are, and their columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from dualform.errors import RecordingError
from dualform.store.collection import COLUMN

SAMPLE = "sample_id"
Source = str | int | Callable[[Any], Any]
"""Where a column stands in a batch: its key, its place in a tuple, or a function of the batch."""
Columns = str | Sequence[str] | Mapping[str, Source] | Callable[[Any], Mapping[str, Any]] | None
FIRST_TENSORS = ("input_ids", "pixel_values", "inputs", "input", "x")
"""In a batch that is a dictionary, these hold the rows rather than the others."""


class BatchColumns:
    """Reads the columns of each batch. Rows are numbered in the loader's order, unless a column names them."""

    def __init__(self, loader: Any, columns: Columns, batch_axis: int | Mapping[str, int] | None):
        self._columns = columns
        self._sources = _sources(columns)
        axis = batch_axis.get("", 0) if isinstance(batch_axis, Mapping) else batch_axis
        self._axis = axis or 0
        self._is_numbered = SAMPLE not in self._sources and not callable(columns)
        _refuse_taken(self._sources)
        if self._is_numbered and is_shuffled(loader):
            raise RecordingError(
                "the loader gives samples in an order of its own, so a row's place does not tell which sample it is. Use shuffle=False; or "
                'have each batch bring the ids of its samples, and say where they stand: columns={"sample_id": "id"} for a batch that is a '
                'dictionary, columns={"sample_id": 2} for the third entry of a tuple.'
            )

    @property
    def compared(self) -> str | None:
        """The column that tells whether a row is the one that was collected; None: there may be none."""
        if self._is_numbered or callable(self._columns):
            return SAMPLE
        return SAMPLE if SAMPLE in self._sources else next(iter(self._sources), None)

    def told_apart(self, columns: Mapping[str, Any]) -> list[Any]:
        """Return what that column holds for the rows of a batch."""
        values = columns.get(self.compared or "")
        if isinstance(values, Tensor):
            return list(values.tolist())
        return [] if values is None else list(values)

    def of_pass(self, loader: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Return each batch of one pass over the data, with its columns."""
        next_number = 0
        for batch in loader:
            columns = self._read(batch)
            if self._is_numbered:
                count = count_rows(batch, self._axis)
                columns[SAMPLE] = torch.arange(next_number, next_number + count)
                next_number += count
            yield batch, columns

    def _read(self, batch: Any) -> dict[str, Any]:
        if callable(self._columns):
            given = dict(self._columns(batch))
            _refuse_taken(given)
            return given
        return {name: _value(batch, name, source) for name, source in self._sources.items()}


def _refuse_taken(names: Collection[str]) -> None:
    if COLUMN in names:
        raise RecordingError(f"columns=: the name {COLUMN!r} is taken: it numbers the checkpoints.")


def _sources(columns: Columns) -> dict[str, Source]:
    if columns is None or callable(columns):
        return {}
    if isinstance(columns, str):
        return {columns: columns}
    if isinstance(columns, Mapping):
        return dict(columns)
    return {name: name for name in columns}


def _value(batch: Any, name: str, source: Source) -> Any:
    if callable(source):
        return source(batch)
    try:
        return batch[source]
    except (LookupError, TypeError):
        there = f"the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"a {_shape_of(batch)}"
        raise RecordingError(
            f"columns=: the column {name!r} is to be found at {source!r} of a batch, but a batch has {there}. Give keys of a dictionary, places "
            f"in a tuple, or functions of the batch."
        ) from None


def _shape_of(batch: Any) -> str:
    kind = type(batch).__name__
    return f"{kind} of {len(batch)} entries" if isinstance(batch, Sequence) else kind


def is_shuffled(loader: Any) -> bool:
    """Return whether a loader may give samples in another order than that of its dataset, and another one each time."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = loader.batch_sampler
    if batches is None:
        return type(loader.sampler) is not SequentialSampler
    return type(batches) is not BatchSampler or type(batches.sampler) is not SequentialSampler


def count_rows(batch: Any, axis: int) -> int:
    """Return how many rows a batch has, by its first tensor."""
    for tensor in _tensors(batch):
        if tensor.dim() > axis:
            return int(tensor.shape[axis])
    raise RecordingError(
        f"a batch of the loader ({type(batch).__name__}) has no tensor that tells how many rows there are. Say how its rows are called: "
        f'columns=lambda batch: {{"sample_id": …}}.'
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        first = [name for name in FIRST_TENSORS if name in batch]
        for name in dict.fromkeys([*first, *batch]):
            yield from _tensors(batch[name])
    elif isinstance(batch, (list, tuple)):
        for entry in batch:
            yield from _tensors(entry)
