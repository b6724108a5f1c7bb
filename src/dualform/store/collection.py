"""Stores that were collected: keys and error signals at fixed weights, from one pass over the data for each checkpoint.

They have the form of a recording, with a step for each batch. Nothing was trained, so no weights changed in these steps. Which steps belong to
which checkpoint stands in the log, and in the column `checkpoint` of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import polars as pl

from dualform.errors import NotRecordedError, StoreDamagedError
from dualform.store.format import Manifest
from dualform.store.reader import Store

SETTING = "collected"
"""Where the manifest's settings hold it."""
COLUMN = "checkpoint"
"""The number of a row's checkpoint, and of a step's in the log."""
PAGE = "docs/trained-models.md"


@dataclass(frozen=True)
class Collection:
    """What is known of a collection as a whole."""

    checkpoints: tuple[str, ...]
    """Their names, in the order of training."""
    loss_mean: str
    """What the loss was a mean over: one of curvature/loss_mean.py's LOSS_MEANS."""
    training_mode: bool = False
    """Whether the model ran in training mode, with dropout and statistics of batches."""
    learning_rates: tuple[float, ...] = ()
    """One for each checkpoint, by which influence weights it; none: all count alike."""

    def dump(self) -> str:
        """Return it as the manifest's settings hold it."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        if len(self.checkpoints) == 1:
            return "collected at a checkpoint, not recorded during training"
        return f"collected at {len(self.checkpoints)} checkpoints, not recorded during training"

    def weight(self, checkpoint: int) -> float:
        """Return by what influence multiplies the scores of a checkpoint; 1 on average."""
        if not self.learning_rates:
            return 1.0
        mean = sum(self.learning_rates) / len(self.learning_rates)
        return self.learning_rates[checkpoint] / mean


@dataclass(frozen=True)
class Span:
    """The steps of a checkpoint: begin ≤ step < end."""

    checkpoint: int
    begin: int
    end: int


def read_collection(manifest: Manifest) -> Collection | None:
    """Return what a manifest says of a collection; None: the store was recorded during training."""
    text = manifest.settings.get(SETTING)
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=Collection)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreDamagedError(f"the manifest is damaged: its setting {SETTING!r} cannot be read ({error}).") from None
    if not found.checkpoints or len(found.learning_rates) not in (0, len(found.checkpoints)):
        raise StoreDamagedError(f"the manifest is damaged: its setting {SETTING!r} does not fit itself.")
    return found


def collection_of(store: Store) -> Collection | None:
    """Return what a store says of its collection; None: it was recorded during training."""
    return store.cached("collection", lambda: read_collection(store.manifest))


def spans_of(store: Store, end: int) -> list[Span]:
    """Return the steps of each checkpoint, up to step `end`, for checkpoints that have any."""
    log = store.log.filter(pl.col("step") < end)
    if COLUMN not in log.columns:
        return []
    by_checkpoint = log.group_by(COLUMN).agg(pl.col("step").min().alias("begin"), pl.col("step").max().alias("last"))
    lines = by_checkpoint.sort("begin").iter_rows()
    return [Span(int(checkpoint), begin, last + 1) for checkpoint, begin, last in lines]


def refuse_collected(store: Store, question: str) -> None:
    """Refuse a question about what training did, if nothing was recorded of it."""
    found = collection_of(store)
    if found is not None:
        raise NotRecordedError(
            f"{question} needs a recording of the training, and {store.location} was {found}: its slots have no coefficients, and no sums. Ask "
            f'attend(), influence(), sources(method="influence") or mislabelled(). What can be asked of models that are already trained: {PAGE}.'
        )
