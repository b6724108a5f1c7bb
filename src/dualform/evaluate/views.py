"""The ways to score training samples for a test example that a recording offers: the table of views."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import polars as pl
import torch
from torch import Tensor

from dualform import plugins
from dualform.errors import QuestionError
from dualform.evaluate.study import Study
from dualform.progress import Progress
from dualform.query.dual import Dual

View = Callable[[Dual, Study, Progress | None], Tensor]
"""Scores (test examples, samples ascending), positive for what supports the target."""


@dataclass(frozen=True)
class Peer:
    """A view that another package computes, for comparison."""

    package: str
    """The package that must be importable."""
    view: View

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return find_spec(self.package) is not None


def attention(dual: Dual, study: Study, progress: Progress | None = None) -> Tensor:
    """What the last layer looks at: its attention weights, as in the paper."""
    answers = dual.attend(study.inputs)
    return _by_sample([answers[list(answers)[-1]].total(study.column)], dual, study)


def contribution(dual: Dual, study: Study, progress: Progress | None = None) -> Tensor:
    """What the target reads: the contributions of all layers."""
    answers = dual.contributions(study.inputs, target=study.target, progress=progress)
    return _by_sample((answers[name].total(study.column) for name in answers), dual, study)


def influence(method: str) -> View:
    """What would change: an estimate."""

    def view(dual: Dual, study: Study, progress: Progress | None = None) -> Tensor:
        answer = dual.influence(
            study.inputs, target=study.target, method=method, sample=study.column, progress=progress
        )
        return _by_sample([answer.total(study.column)], dual, study)

    return view


VIEWS: dict[str, View] = {
    "attention": attention,
    "contribution": contribution,
    "whitened": influence("whitened"),
    "kernel": influence("kernel"),
    "sketch": influence("sketch"),
}
"""The last three are the methods of `dual.influence`."""


def peers() -> dict[str, Peer]:
    """Views of other packages, by name: those that installed packages add (`dualform.plugins`)."""
    table: dict[str, Peer] = {}
    for entry in plugins.entry_points(plugins.VIEWS).values():
        table |= entry.load()
    return table


def samples_of(dual: Dual, study: Study) -> Tensor:
    """The ids of the samples that were trained on, ascending."""
    rows = dual.rows
    if study.column not in rows.columns or not rows.schema[study.column].is_integer():
        came = f"of type {rows.schema[study.column]}" if study.column in rows.columns else "not there"
        raise QuestionError(
            f"the column {study.column!r} is {came}; evaluate() needs one whole number for each row: recorder.batch(sample_id=ids)."
        )
    return torch.tensor(rows[study.column].unique().sort().to_list(), dtype=torch.int64)


def _by_sample(totals: Iterable[pl.DataFrame], dual: Dual, study: Study) -> Tensor:
    """Totals of several layers, and of the positions of an example, become one number for an example and a sample."""
    ids = samples_of(dual, study)
    scores: Any = 0
    for frame in totals:
        frame = frame.drop_nulls(study.column)  # what serves all rows belongs to no sample
        wide = frame.group_by("query", study.column).agg(pl.col("total").sum()).sort("query", study.column)
        scores = scores + torch.from_numpy(wide["total"].to_numpy().copy()).reshape(-1, len(ids))
    return torch.as_tensor(scores)
