"""Which training samples look mislabelled: those whose error signals at the output stayed large, visit after visit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.curvature.loss_mean import LossMean
from dualform.dual.gradients import compute_dtype
from dualform.errors import NotRecordedError, QuestionError
from dualform.layers.layer import Layer
from dualform.query.answer import check_top
from dualform.query.conditions import Condition, Where
from dualform.query.groups import Groups
from dualform.query.influence.softmax import TOLERANCE, is_softmax
from dualform.query.slots import written
from dualform.store.format import NO_ROW
from dualform.store.reader import Store

NO_UNIT = torch.iinfo(torch.int64).max


def mislabelled(
    store: Store,
    layers: Sequence[str],
    end: int,
    *,
    k: int | None,
    by: str | Sequence[str],
    layer: str | None,
    where: Where | None,
    reduction: str,
) -> pl.DataFrame:
    """Return one line for each group of the layer's slots, the largest mean error signal first; the k first of them, or all.

    layers: the names of the recorded layers. layer: default the last of them that attends. `Dual.mislabelled` explains the rest.
    """
    if k is not None:
        check_top(k, absolute=False, lowest=False)
    if reduction not in ("mean", "sum"):
        raise QuestionError(f'reduction={reduction!r}: expected "mean" or "sum", as the loss has it.')
    chosen = _output_layer(store, layers, layer)
    groups = Groups(store, chosen.name, by, end)
    slots = _Slots(
        store=store,
        layer=chosen,
        end=end,
        groups=groups,
        condition=None if where is None else Condition(store, where, end),
        loss_mean=LossMean(store, "tokens" if reduction == "mean" else "none"),
    )
    sizes = torch.zeros(len(groups), dtype=torch.float64)
    visits = torch.zeros(len(groups), dtype=torch.int64)
    for codes, errors in slots:
        sizes.index_add_(0, codes, errors.norm(dim=1).double())
        visits.index_add_(0, codes, torch.ones_like(codes))
    scores = torch.where(visits > 0, sizes / visits.clamp(min=1), -torch.inf)
    visited = int((visits > 0).sum())
    order = scores.argsort(descending=True, stable=True)[:visited][:k]
    evidence = _Evidence(order, len(groups), chosen.d_out)
    for codes, errors in slots:
        evidence.add(codes, errors)
    ranked = pl.DataFrame({"rank": np.arange(1, len(order) + 1), "score": scores[order].numpy()})
    shown = evidence.frame(visits[order])
    # Columns of the recording make way for those of this table
    taken = {name: f"{name}_recorded" for name in (*ranked.columns, *shown.columns)}
    described = groups.described()[order.numpy()]
    described = described.rename({"position": "slot_position", **taken}, strict=False)
    return pl.concat([ranked, described, shown], how="horizontal")


def _output_layer(store: Store, layers: Sequence[str], layer: str | None) -> Layer:
    """Return the layer whose error signals are asked for, if all of them were kept."""
    if not store.manifest.keeps_gradients:
        raise NotRecordedError(
            f"mislabelled() needs the error signals of single slots, but {store.location} keeps "
            f'{store.manifest.keep} only. Record with keep="slots".'
        )
    attending = [name for name in layers if store.layer(name)[1].attends]
    if layer is None:
        layer = attending[-1] if attending else ""
    _, chosen = store.layer(layer)
    if not chosen.attends:
        raise NotRecordedError(
            f"mislabelled() needs all error signals of layer {layer!r}, which has no single error signals."
        )
    if store.is_summed(chosen.name):
        raise NotRecordedError(
            f"mislabelled() needs the error signals of single slots. {store.why_no_positions(chosen.name)[0].upper()}"
            f"{store.why_no_positions(chosen.name)[1:]}"
        )
    if chosen.outputs:
        raise NotRecordedError(
            f"mislabelled() needs all error signals of layer {layer!r}, which kept those of some output units only (outputs=)."
        )
    return chosen


@dataclass(frozen=True)
class _Slots:
    """The slots of a layer that had a loss, of some row: padding and ignored labels say nothing about a sample's label."""

    store: Store
    layer: Layer
    end: int
    groups: Groups
    condition: Condition | None
    loss_mean: LossMean

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the numbers of groups (m,), and error signals (m, d_out) with the loss's mean undone, some slots at a time."""
        dtype = compute_dtype(self.store, self.layer.parameters[0])
        for chunk in self.store.chunks(self.layer.name, end_step=self.end):
            selected = written(chunk) & (chunk.rows() != NO_ROW)
            if self.condition is not None:
                selected &= self.condition(chunk)
            codes = torch.from_numpy(self.groups(chunk))
            for low, high in chunk.pieces(self.layer.d_out):
                places = torch.from_numpy(np.flatnonzero(selected[low:high]))
                divisors = self.loss_mean.of_slots(chunk, low, high, dtype)
                errors = chunk.errors(dtype, low, high) * divisors[:, None]
                yield codes[low:high][places], errors[places]


class _Evidence:
    """What the model said of some groups. Under softmax cross-entropy an error signal is p − 1[label], so it tells p."""

    def __init__(self, chosen: Tensor, groups: int, d_out: int):
        count = len(chosen)
        self._place = torch.full((groups,), -1, dtype=torch.int64)
        self._place[chosen] = torch.arange(count)
        self._sums = torch.zeros(count, d_out, dtype=torch.float64)
        self._missing = torch.zeros(count, dtype=torch.float64)
        self._wrong = torch.zeros(count, dtype=torch.int64)
        self._lowest = torch.full((count,), NO_UNIT)
        self._highest = torch.full((count,), -1)
        self._is_softmax = True

    def add(self, codes: Tensor, errors: Tensor) -> None:
        """Error signals (m, d_out) of slots of these groups (m,)."""
        places = self._place[codes]
        is_chosen = places >= 0
        places = places[is_chosen]
        errors = errors[is_chosen]
        if not len(places):
            return
        least, unit = errors.min(1)
        fits = is_softmax(errors) & (least >= -1 - TOLERANCE)
        self._is_softmax &= bool(fits.all())
        self._sums.index_add_(0, places, errors.double())
        self._missing.index_add_(0, places, -least.clamp(max=0).double())
        is_wrong = errors.amax(1) > 1 + least
        self._wrong.index_add_(0, places, is_wrong.long())
        some = least < 0  # the label of what is learnt to the last bit shows at other visits
        self._lowest.scatter_reduce_(0, places[some], unit[some], "amin")
        self._highest.scatter_reduce_(0, places[some], unit[some], "amax")

    def frame(self, visits: Tensor) -> pl.DataFrame:
        """Return visits, unit, probability, said, said_probability, wrong; null where the error signals do not tell."""
        count, d_out = self._sums.shape
        unit = self._lowest.clamp(max=d_out - 1)
        others = self._sums.clone()
        others[torch.arange(count), unit] = -torch.inf
        said_sum, said = others.max(1)
        is_known = torch.full((count,), self._is_softmax and d_out > 1)
        has_one_label = is_known & (self._lowest == self._highest)
        columns = [
            _column("unit", unit, has_one_label),
            _column("probability", 1 - self._missing / visits, is_known),
            _column("said", said, has_one_label),
            _column("said_probability", said_sum / visits, has_one_label),
            _column("wrong", self._wrong, is_known),
        ]
        return pl.select(pl.Series("visits", visits.numpy()), *columns)


def _column(name: str, values: Tensor, is_known: Tensor) -> pl.Expr:
    """null where nothing is known."""
    known = pl.lit(pl.Series(is_known.numpy()))
    return pl.when(known).then(pl.lit(pl.Series(values.numpy()))).alias(name)
