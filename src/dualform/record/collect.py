"""`dualform.collect`: keys and error signals of a model that is already trained, from a pass over its training data at fixed weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.curvature.loss_mean import LOSS_MEANS
from dualform.errors import RecordingError, StoreMissingError
from dualform.layers.projected import DEFAULT_SIZE
from dualform.progress import Progress, ignore_progress
from dualform.record import optimizers
from dualform.record.batch_columns import BatchColumns, Columns
from dualform.record.begin import record
from dualform.record.fixed_weights import FixedWeights
from dualform.record.keep import Keep
from dualform.record.moments import Checkpoints, Moment, moments_of
from dualform.record.recorder import Recorder
from dualform.record.unchanged import left_as_it_was
from dualform.store import collection
from dualform.store.files import files_at
from dualform.store.reader import Store

LossFunction = Callable[[nn.Module, Any], Tensor]
"""From the model and a batch of the loader to the loss, a number."""


def collect(
    model: nn.Module,
    loader: Any,
    loss_fn: LossFunction,
    path: str | os.PathLike[str],
    *,
    checkpoints: Checkpoints = None,
    learning_rates: Sequence[float] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    columns: Columns = None,
    loss_mean: str = "tokens",
    training: bool = False,
    layers: str | Collection[str] | None = None,
    exclude: str | Collection[str] | Mapping[str, str] = (),
    outputs: Mapping[str, Sequence[int]] | None = None,
    batch_axis: int | Mapping[str, int] | None = None,
    check_rows: bool = True,
    on_unclear_rows: str = "ask",
    dtype: str | None = None,
    keep: Keep = "slots",
    projection: int = DEFAULT_SIZE,
    on_unexplained: str = "raise",
    overwrite: bool = False,
    resume: bool = False,
    queue_bytes: int = 256 << 20,
    chunk_bytes: int = 64 << 20,
    progress: Progress | None = None,
) -> Path:
    """Collect keys and error signals of training data at fixed weights into the folder `path`, and return the folder.

    It is opened like a recording: attention and influence can be asked. The training was not recorded, so there are no
    contributions, masks and sums. The model is left as it was.

    loader: gives batches of any form, the same ones for each checkpoint. loss_fn(model, batch): the training loss of a batch, a tensor of one number.
    checkpoints: state dicts, paths of .pt or .safetensors files or of folders of Hugging Face, or functions that load weights into the
    model they get; a list in the order of training, or {name: checkpoint}. Default: the weights that the model has. Influence is summed over
    them, weighted by learning_rates, one for each, as TracIn does.
    optimizer: collect only the parameters in it; default: all that require a gradient.
    columns: where the columns of the rows stand in a batch: {"sample_id": "id", "label": 1} by keys of a dictionary or places in a tuple, a list
    of keys, or a function of the batch. Without a `sample_id`, samples are numbered in the order of a loader that does not shuffle.
    loss_mean: what the loss is a mean over: "tokens", the positions that have a loss (of a classifier, its rows); "rows" of the batch; or
    "none", for a sum. Influence undoes it.
    training: run the model in training mode, with dropout and statistics of batches.
    resume: go on with a collection that was cut, if there is one in the folder; the loader must give the same batches again.
    progress: called with the name of the checkpoint, and how many batches are done.
    The other arguments are those of `record()`.
    """
    if not isinstance(model, nn.Module):
        raise RecordingError(
            f"collect() got {type(model).__name__!r} where it expected the nn.Module that was trained."
        )
    if keep == "totals":
        raise RecordingError(
            'collect() keeps slots: keep="totals" has sums of what was trained, and nothing is trained here.'
        )
    inner = getattr(model, "_orig_mod", model)  # what torch.compile() wraps
    moments = moments_of(checkpoints)
    about = _described(moments, learning_rates, loss_mean, training)
    reader = BatchColumns(loader, columns, batch_axis)
    fixed = FixedWeights(_parameters(inner, optimizer), about)
    done = _Done.in_folder(path, about, reader.compared) if resume else None
    options = {"layers": layers, "exclude": exclude, "outputs": outputs, "batch_axis": batch_axis}
    options |= {"check_rows": check_rows, "on_unclear_rows": on_unclear_rows, "dtype": dtype, "keep": keep}
    options |= {"projection": projection}
    options |= {"on_unexplained": on_unexplained, "queue_bytes": queue_bytes, "chunk_bytes": chunk_bytes}
    with left_as_it_was(inner, weights=checkpoints is not None):
        inner.train(training)
        moments[done.checkpoint if done else 0].load(inner)
        with record(model, fixed, path, overwrite=overwrite, resume=done is not None, **options) as recorder:  # type: ignore[arg-type]
            passes = _Passes(model, inner, loader, loss_fn, reader, fixed, recorder, progress or ignore_progress)
            passes.run(moments, done)
    return Path(path)


def _described(
    moments: Sequence[Moment], learning_rates: Sequence[float] | None, loss_mean: str, training: bool
) -> collection.Collection:
    if loss_mean not in LOSS_MEANS:
        raise RecordingError(f"loss_mean={loss_mean!r}: expected one of {', '.join(map(repr, LOSS_MEANS))}.")
    rates = tuple(float(rate) for rate in learning_rates or ())
    if rates and (len(rates) != len(moments) or not all(0 < rate < float("inf") for rate in rates)):
        raise RecordingError(
            f"learning_rates={list(rates)}: expected a number above 0 for each of the {len(moments)} checkpoints."
        )
    return collection.Collection(tuple(moment.name for moment in moments), loss_mean, training, rates)


def _parameters(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> list[nn.Parameter]:
    every = list(model.parameters())
    if optimizer is not None:
        groups = chain.from_iterable(one.param_groups for one in optimizers.optimizer_list(optimizer))
        every = list(chain.from_iterable(group["params"] for group in groups))
    found = [parameter for parameter in every if parameter.requires_grad]
    if not found:
        raise RecordingError(
            "no parameter of the model requires a gradient, so there are no error signals. Thaw what was trained: "
            "model.requires_grad_(True), or that of some layers."
        )
    return found


@dataclass(frozen=True)
class _Done:
    """What a collection that was cut has already."""

    checkpoint: int
    """The last that was begun."""
    batches: int
    """How many batches of it there are."""
    rows: list[Any]
    """What tells the rows of these batches from others; empty: nothing does."""

    @classmethod
    def in_folder(cls, path: str | os.PathLike[str], now: collection.Collection, compared: str | None) -> _Done | None:
        """Return what is in a folder; None: nothing yet. compared: the column by which rows are told apart."""
        try:
            store = Store(files_at(path))
        except StoreMissingError:
            return None
        before = collection.collection_of(store)
        if before is None:
            raise RecordingError(
                f"resume: {path} holds a recording of a training, not a collection. Collect into another folder."
            )
        _compare(before, now, str(path))
        spans = collection.spans_of(store, store.end_step)
        if not spans:
            return cls(0, 0, [])
        last = spans[-1]
        mine = store.rows.filter(store.rows["step"] >= last.begin)
        known = compared if compared in mine.columns else None
        return cls(last.checkpoint, last.end - last.begin, mine[known].to_list() if known else [])


def _compare(before: collection.Collection, now: collection.Collection, path: str) -> None:
    """Further checkpoints may come behind those that are there; everything else must be the same."""
    count = len(before.checkpoints)
    for what in ("checkpoints", "loss_mean", "training_mode", "learning_rates"):
        known, given = getattr(before, what), getattr(now, what)
        if isinstance(given, tuple) and len(now.checkpoints) > count:
            given = given[:count]
        if known != given:
            raise RecordingError(f"resume: the collection in {path} has {what}={known}, and now it is {given}.")


@dataclass
class _Passes:
    """Goes through the data once for each checkpoint."""

    model: nn.Module
    """What loss_fn gets: the model, or what torch.compile(model) gave."""
    inner: nn.Module
    loader: Any
    loss_fn: LossFunction
    reader: BatchColumns
    fixed: FixedWeights
    recorder: Recorder
    progress: Progress

    def run(self, moments: Sequence[Moment], done: _Done | None) -> None:
        """Collect what is not done yet. The first checkpoint of these is loaded."""
        first = done.checkpoint if done else 0
        for number, moment in enumerate(moments[first:], first):
            skipped = done if done and number == first else None
            if number > first:
                moment.load(self.inner)
            self._collect(number, moment, skipped)

    def _collect(self, number: int, moment: Moment, skipped: _Done | None) -> None:
        total = len(self.loader) if hasattr(self.loader, "__len__") else 0
        place = 0
        for batch, columns in self._new_batches(skipped):
            self._collect_batch(number, batch, columns)
            if place == 0 and number and skipped is None:
                # The weights of the first checkpoint were stored when recording began. Those of the others are stored behind their first batch: a
                # snapshot after so many steps has the weights with which the last of them was made
                self.recorder.seal()
            place += 1
            self.progress(moment.name, place + (skipped.batches if skipped else 0), total)
        if not place and skipped is None:
            raise RecordingError(
                f"the loader gave no batch for {moment.name!r}. If it was used up by the pass before, give one that can be gone through "
                f"again: a DataLoader, or a list of batches."
            )

    def _new_batches(self, skipped: _Done | None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The batches of a pass, without those that are collected already."""
        batches = self.reader.of_pass(self.loader)
        if skipped is not None:
            seen: list[Any] = []
            for _ in range(skipped.batches):
                _, columns = next(batches, (None, {}))
                seen += self.reader.told_apart(columns)
            if skipped.rows and seen != skipped.rows:
                raise RecordingError(
                    f"resume: the first {skipped.batches} batches of the loader are not those that were collected. Give the same batches in the same "
                    f"order (shuffle=False, or a generator with the same seed), or collect into a new folder."
                )
        return batches

    def _collect_batch(self, number: int, batch: Any, columns: Mapping[str, Any]) -> None:
        self.recorder.batch(**{**columns, collection.COLUMN: number})
        loss = self.loss_fn(self.model, batch)
        _check_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.fixed.step()
        self.recorder.log(**{collection.COLUMN: number, "loss": loss.item()})
        for parameter in self.inner.parameters():
            parameter.grad = None


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise RecordingError(
            f"loss_fn(model, batch) gave {type(loss).__name__}: expected the loss of the batch, a tensor of one number (of a model of Hugging "
            f"Face: model(**batch).loss)."
        )
    if loss.numel() != 1:
        raise RecordingError(
            f"loss_fn(model, batch) gave a tensor of shape {tuple(loss.shape)}: expected one number. Return the mean or the sum over the "
            f"batch, and say which: loss_mean=."
        )
    if not loss.requires_grad:
        raise RecordingError(
            "loss_fn(model, batch) gave a number without a gradient. Compute it from the model's output, without torch.no_grad()."
        )
