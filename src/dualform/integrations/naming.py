"""Names for what a Trainer trains on: sample ids in the dataset, in each batch, and for each position of packed rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.utils import data
from transformers import DataCollatorWithFlattening

from dualform.errors import RecordingError

SAMPLE = "sample_id"
NO_SAMPLE = -1
"""The sample id of padding, where positions have names."""
TEXT = "text"


class Samples:
    """What is kept of each sample: texts in a table, one line for each sample; numbers and booleans beside each row."""

    def __init__(self, table: pl.DataFrame | None = None, *, per_row: bool = True):
        """per_row: False if a row holds several samples."""
        self.table = table
        self._numbers: dict[str, pl.Series] = {}
        self._places: dict[int, int] = {}
        if table is not None and per_row:
            self._places = {sample: place for place, sample in enumerate(table[SAMPLE].to_list())}
            self._numbers = {one.name: one for one in table if one.name != SAMPLE and _is_number(one.dtype)}

    def columns_of(self, ids: Tensor) -> dict[str, Any]:
        """Return the columns of recorder.batch() for the samples of a batch, (rows,) or (rows, positions)."""
        columns: dict[str, Any] = {SAMPLE: ids}
        if self._numbers:
            places = [self._places[sample] for sample in ids.tolist()]
            columns.update({name: numbers[places] for name, numbers in self._numbers.items()})
        return columns


def _is_number(dtype: pl.DataType) -> bool:
    return dtype.is_numeric() or dtype == pl.Boolean


class NamingCollator:
    """Collates a batch as another collator does, and adds the ids of its samples, (rows,) or (rows, positions)."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate
        self.is_flattening = getattr(collate, "padding_free", False) or isinstance(collate, DataCollatorWithFlattening)
        """Whether all samples of a batch become one row."""

    def __call__(self, features: list[Any]) -> Any:
        """Collate a batch. Without ids, as in evaluation, there is nothing to add."""
        if not (isinstance(features[0], Mapping) and SAMPLE in features[0]):
            return self._collate(features)
        rest = [{name: value for name, value in feature.items() if name != SAMPLE} for feature in features]
        ids = [feature[SAMPLE] for feature in features]
        lengths = [len(feature["input_ids"]) for feature in rest] if self.is_flattening else []
        batch = self._collate(rest)
        if self.is_flattening:
            flat = np.concatenate([np.broadcast_to(one, length) for one, length in zip(ids, lengths, strict=True)])
            batch[SAMPLE] = _padded([flat], batch["input_ids"].shape[1])
        elif isinstance(ids[0], Sequence):
            batch[SAMPLE] = _padded(ids, batch["input_ids"].shape[1])
        else:
            batch[SAMPLE] = torch.tensor(ids)
        return batch


def _padded(rows: Sequence[Any], positions: int) -> Tensor:
    padded = torch.full((len(rows), positions), NO_SAMPLE)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = torch.as_tensor(ids)
    return padded


class _NumberedDataset(data.Dataset[Any]):
    """A dataset of dictionaries, each with its number."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        return {**self._dataset[number], SAMPLE: number}


def name_samples(dataset: Any, columns: Sequence[str], *, per_row: bool = True) -> tuple[Any, Samples]:
    """Return a dataset whose samples have ids, and what is kept of them. per_row: False if a row holds several samples."""
    if isinstance(dataset, datasets.Dataset):
        dataset = _with_ids(dataset)
        table = pl.DataFrame({name: dataset[name][:] for name in (SAMPLE, *_checked(columns, dataset.column_names))})
        return dataset, Samples(table if columns else None, per_row=per_row)
    if columns:
        raise RecordingError(
            f"columns={list(columns)} can be read from a datasets.Dataset, not from {type(dataset).__name__}."
        )
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(lambda sample, number: {SAMPLE: number, **sample}, with_indices=True), Samples()
    if isinstance(dataset, data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise RecordingError(
            f"samples of {type(dataset).__name__} have no number. Give the trainer a dataset that has a length, or a datasets.IterableDataset."
        )
    return _NumberedDataset(dataset), Samples()


def _with_ids(dataset: datasets.Dataset) -> datasets.Dataset:
    if SAMPLE not in dataset.column_names:
        return dataset.add_column(SAMPLE, list(range(len(dataset))))
    if not datasets.Value("int64").dtype == getattr(dataset.features[SAMPLE], "dtype", None):
        raise RecordingError(
            f"the dataset's column {SAMPLE!r} is {dataset.features[SAMPLE]}; expected int64. Rename it, and keep it with columns=[…]: samples are then numbered."
        )
    return dataset


def _checked(columns: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    missing = [name for name in columns if name not in known]
    if missing:
        raise RecordingError(f"columns={missing}: the training dataset has no such column. It has {', '.join(known)}.")
    return columns


def name_documents(trainer: Any, documents: datasets.Dataset | None, columns: Sequence[str]) -> tuple[Any, Samples]:
    """Return the packed dataset of an SFTTrainer with a document's id for each token, and what is kept of the documents."""
    packed = trainer.train_dataset
    if documents is None:
        return _name_pieces(packed, columns, trainer.processing_class)
    named, samples = name_samples(documents, columns, per_row=False)
    repacked = _packed_again(trainer, named)
    if repacked["input_ids"][:] != packed["input_ids"][:]:
        raise RecordingError(
            "documents= is not what the trainer has packed: packed again, it gives other tokens. Give the dataset that the trainer was given."
        )
    return repacked, samples


def _packed_again(trainer: Any, documents: datasets.Dataset) -> datasets.Dataset:
    """Do what SFTTrainer did when it was made, with one more column: packing moves the ids with the tokens."""
    from trl.data_utils import pack_dataset

    args = trainer.args
    whole = copy.copy(args)
    whole.max_length = None
    whole.shuffle_dataset = False
    tokens = trainer._prepare_dataset(
        documents, trainer.processing_class, whole, False, trainer._formatting_func, "train"
    )
    ids = [[sample] * len(row) for sample, row in zip(tokens[SAMPLE], tokens["input_ids"], strict=True)]
    tokens = tokens.select_columns(["input_ids", "labels"]).add_column(SAMPLE, ids)
    if args.shuffle_dataset:
        tokens = tokens.shuffle(seed=args.seed)
    packed = pack_dataset(tokens, args.max_length, args.packing_strategy, {"num_proc": args.dataset_num_proc})
    return packed.shuffle(seed=args.seed) if args.shuffle_dataset else packed


def _name_pieces(packed: Any, columns: Sequence[str], tokenizer: Any) -> tuple[Any, Samples]:
    """Number the pieces of packed rows. All that is known of them are their tokens."""
    if "seq_lengths" not in (packed.column_names or ()) or not isinstance(packed, datasets.Dataset):
        raise RecordingError(
            "where documents begin is not known after this packing. Say documents=, the dataset given to the trainer."
        )
    _checked(columns, [TEXT])
    ids = []
    texts: list[str] = []
    for tokens, lengths in zip(packed["input_ids"], packed["seq_lengths"], strict=True):
        pieces = np.split(np.asarray(tokens), np.cumsum(lengths)[:-1])
        ids.append(np.repeat(np.arange(len(texts), len(texts) + len(lengths)), lengths).tolist())
        texts += [tokenizer.decode(piece.tolist()) if columns else "" for piece in pieces]
    table = pl.DataFrame({SAMPLE: range(len(texts)), TEXT: texts}) if columns else None
    return packed.add_column(SAMPLE, ids), Samples(table, per_row=False)
