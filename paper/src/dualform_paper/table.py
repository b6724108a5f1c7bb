"""Table 1: does the class with the most attention agree with the label, and with the model's answer?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform_paper.data import Pixels
from dualform_paper.settings import CLASSES

PAPER = {
    "0": {"target_wrong": (17.2, 2.7), "output_wrong": (49.5, 1.5), "right": (75.1, 0.0)},
    "2": {"target_wrong": (18.0, 2.9), "output_wrong": (52.9, 2.9), "right": (78.8, 0.8)},
    "4": {"target_wrong": (20.6, 2.6), "output_wrong": (60.1, 4.5), "right": (84.7, 1.1)},
}
"""The paper's, by our layer names: mean and deviation over 5 runs, in percent."""


@dataclass(frozen=True)
class Votes:
    """How often the class with the largest total is the label (target) and the answer (output), in percent.

    Where the model is right, the two are the same number.
    """

    target_wrong: float
    output_wrong: float
    right: float


def votes(totals: Tensor, labels: Tensor, answers: Tensor) -> Votes:
    """totals (queries, classes); labels and answers (queries,)."""
    elected, right = totals.argmax(1), answers == labels

    def percent(agree: Tensor, of: Tensor) -> float:
        return 100 * float(agree[of].double().mean()) if bool(of.any()) else float("nan")

    return Votes(
        percent(elected == labels, ~right), percent(elected == answers, ~right), percent(elected == labels, right)
    )


def by_class(totals: pl.DataFrame, datasets: tuple[str, ...]) -> Tensor:
    """Totals by dataset and label, as `total(["dataset", "label"])` gives them: (queries, datasets, classes); 0 where there is none."""
    queries = 0 if not totals.height else int(totals["query"].max()) + 1  # type: ignore[arg-type]
    found = torch.zeros(queries, len(datasets), CLASSES, dtype=torch.float64)
    which = totals["dataset"].replace_strict(list(datasets), list(range(len(datasets))), return_dtype=pl.Int64)
    places = (torch.tensor(column.to_list()) for column in (totals["query"], which, totals["label"]))
    found[tuple(places)] = torch.from_numpy(totals["total"].to_numpy().copy())
    return found


def raw_totals(rows: pl.DataFrame, train: Mapping[str, Pixels], queries: Pixels) -> Tensor:
    """Layer 0 with raw pixels (footnote 7): Σ over slots of a class of pixels · query, (queries, classes).

    rows: of the recording; train and queries: (n, 28, 28). Pixels are not negative, so the sum of products is the product with a sum:
    one image a class.
    """
    visits = rows.group_by("dataset", "sample_id", "label").len()
    sums = np.zeros((CLASSES, queries[0].size))
    for (name, label), part in visits.group_by("dataset", "label"):
        images = train[str(name)].reshape(-1, queries[0].size)[part["sample_id"].to_numpy()]
        sums[int(label)] += part["len"].to_numpy().astype(np.float64) @ images / 255
    seen = torch.from_numpy(queries.reshape(len(queries), -1).copy()).float().div_(255)
    return seen.double() @ torch.from_numpy(sums).T
