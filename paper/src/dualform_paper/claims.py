"""What the paper says in words, measured on all test images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

import dualform
from dualform_paper.settings import CLASSES

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
BINS = 10
"""Into how many parts the training is cut, to see when the top slots were written."""
HUBS = 3
"""The paper speaks of images that are often in the top 3."""


@dataclass(frozen=True)
class Rows:
    """The columns of all rows, (rows,); in these networks every row has one slot in each layer, with the row's number."""

    labels: Ints
    steps: Ints
    samples: Ints
    datasets: Ints
    """Numbers of datasets."""
    names: tuple[str, ...]

    @staticmethod
    def of(dual: dualform.Dual, names: tuple[str, ...]) -> Rows:
        """Of a recording."""
        rows = dual.rows
        which = rows["dataset"].replace_strict(list(names), list(range(len(names))), return_dtype=pl.Int64)
        labels, steps, samples = (rows[name].to_numpy().astype(np.int64) for name in ("label", "step", "sample_id"))
        return Rows(labels, steps, samples, which.to_numpy(), names)


def wrong_top(best: Ints, rows: Rows, labels: Ints, right: Bools) -> dict[str, float]:
    """How often the best slots are not of the right class although the answer is right. best (queries, k): slots, best first."""
    wrong = (rows.labels[best] != labels[:, None])[right]
    return {
        "best slot of another class": _mean(wrong[:, 0]),
        "one of the best three of another class": _mean(wrong[:, :HUBS].any(1)),
        "share of the best ten of another class": _mean(wrong[:, :10]),
    }


def _mean(of: np.ndarray[Any, Any]) -> float:
    return float(of.mean()) if of.size else float("nan")


def hubs(best: Ints, rows: Rows) -> dict[str, Any]:
    """Training images that are in the top 3 of many test images."""
    images = rows.datasets[best[:, :HUBS]] << 32 | rows.samples[best[:, :HUBS]]
    apart = [np.unique(one) for one in images]  # an image may fill several places with its visits
    found, counts = np.unique(np.concatenate(apart) if apart else images.ravel(), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    label_of = dict(zip((rows.datasets << 32 | rows.samples).tolist(), rows.labels.tolist(), strict=True))
    return {
        "images that are in some top 3": len(found),
        "images that fill half of all places": int((np.cumsum(counts[order]) < counts.sum() / 2).sum()) + 1,
        "most frequent": [
            {
                "dataset": rows.names[int(found[n]) >> 32],
                "sample_id": int(found[n]) & 0xFFFFFFFF,
                "label": label_of[int(found[n])],
                "share of test images": float(counts[n] / len(best)),
            }
            for n in order[:5]
        ],
    }


def recency(best: Ints, rows: Rows, steps: int) -> dict[str, Any]:
    """When the best slots were written: their share in each tenth of the training; by chance each tenth has the same.

    "late" is the later half of them by rank, of which the paper says that recent slots matter somewhat more.
    """

    def shares(slots: Ints) -> list[float]:
        counted = np.bincount(np.minimum(rows.steps[slots.ravel()] * BINS // steps, BINS - 1), minlength=BINS)
        return [float(n) for n in counted / max(counted.sum(), 1)]

    k = best.shape[1]
    return {"all": shares(best), "first": shares(best[:, :10]), "late": shares(best[:, k // 2 :]), "chance": 1 / BINS}


def depth(totals: Tensor, labels: Tensor) -> dict[str, float]:
    """The right class's part of all attention. totals (queries, classes)."""
    own = totals.gather(1, labels.unsqueeze(1))[:, 0]
    shares = own / totals.sum(1)
    ranks = (totals > own.unsqueeze(1)).sum(1) + 1
    return {
        "share of the right class": float(shares.mean()),
        "rank of the right class": float(ranks.double().mean()),
    }


def cross_task(totals: Tensor, own: int) -> float:
    """How much of all attention goes to another dataset than the test image's own. totals (queries, datasets, classes)."""
    of_dataset = totals.sum(2)
    return float((1 - of_dataset[:, own] / of_dataset.sum(1)).mean())


def cross_task_top(best: Ints, own: int, rows: Rows) -> float:
    """How many of the best ten slots are of another dataset."""
    return _mean(rows.datasets[best[:, :10]] != own)


def weighed_by_value(dual: dualform.Dual, layer: str, queries: Tensor) -> Tensor:
    """Σ over a class's slots of attention weight × ‖value‖, (queries, classes): what the paper tried and left out.

    Only where neither keys nor queries are negative: then the sum is a product with one vector for each class.
    """
    labels = torch.from_numpy(dual.rows["label"].to_numpy().copy())
    sums = torch.zeros(CLASSES, queries.shape[1], dtype=torch.float64)
    for first, keys, values in dual.layer(layer).pieces():
        weighed = keys * torch.linalg.vector_norm(values, dim=1, keepdim=True)
        sums.index_add_(0, labels[first : first + len(keys)], weighed.double())
    return queries.double() @ sums.T
