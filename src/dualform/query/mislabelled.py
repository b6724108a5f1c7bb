"""Which training samples look mislabelled: those whose error signals at the output stayed large, visit after visit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.influence.loss_mean import LossMean
from dualform.query.groups import Groups
from dualform.query.masks import Mask
from dualform.query.written import written
from dualform.store.format import NO_ROW
from dualform.store.reader import Store

NO_UNIT = torch.iinfo(torch.int64).max


def mislabelled(
    store: Store,
    layer: str,
    end: int,
    dtype: torch.dtype,
    *,
    k: int | None,
    by: str | Sequence[str],
    where: pl.Expr | str | None,
    mean: bool,
) -> pl.DataFrame:
    """One line for each group of the layer's slots, the largest mean error signal first; the k first of them, or all."""
    groups = Groups(store, layer, by, end)
    sizes = torch.zeros(len(groups), dtype=torch.float64)
    visits = torch.zeros(len(groups), dtype=torch.int64)
    for codes, errors in _slots(store, layer, end, dtype, groups, where, mean):
        sizes.index_add_(0, codes, errors.norm(dim=1).double())
        visits.index_add_(0, codes, torch.ones_like(codes))
    scores = torch.where(visits > 0, sizes / visits.clamp(min=1), -torch.inf)
    order = scores.argsort(descending=True, stable=True)[: int((visits > 0).sum())][:k]
    evidence = _Evidence(order, len(groups), store.layer(layer)[1].d_out)
    for codes, errors in _slots(store, layer, end, dtype, groups, where, mean):
        evidence.add(codes, errors)
    first = pl.DataFrame({"rank": np.arange(1, len(order) + 1), "score": scores[order].numpy()})
    last = evidence.frame(visits[order]).insert_column(0, pl.Series("visits", visits[order].numpy()))
    taken = {name: f"{name}_recorded" for name in (*first.columns, *last.columns)}
    found = groups.described()[order.numpy()].rename({"position": "slot_position", **taken}, strict=False)
    return pl.concat([first, found, last], how="horizontal")


def _slots(
    store: Store, layer: str, end: int, dtype: torch.dtype, groups: Groups, where: pl.Expr | str | None, mean: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Stretches of slots: the numbers of their groups (m,), and error signals (m, d_out) with a mean undone.

    Only slots that had a loss, of some row: padding and ignored labels say nothing about a sample's label.
    """
    mask = None if where is None else Mask(store, where, end)
    loss_mean = LossMean(store, "tokens" if mean else "none")
    d_out = store.layer(layer)[1].d_out
    for chunk in store.chunks(layer, end_step=end):
        kept = written(chunk) & (chunk.rows() != NO_ROW)
        if mask is not None:
            kept &= mask(chunk)
        numbers = groups(chunk)
        for low, high in chunk.pieces(d_out):
            places = torch.from_numpy(np.flatnonzero(kept[low:high]))
            errors = chunk.errors(dtype, low, high) * loss_mean.of_slots(chunk, low, high, dtype).unsqueeze(1)
            yield torch.from_numpy(numbers[low:high])[places], errors[places]


class _Evidence:
    """What the model said of some groups. Under softmax cross-entropy an error signal is p − 1[label], so it tells p."""

    def __init__(self, chosen: Tensor, groups: int, d_out: int):
        self._place = torch.full((groups,), -1, dtype=torch.int64)
        self._place[chosen] = torch.arange(len(chosen))
        self._sums = torch.zeros(len(chosen), d_out, dtype=torch.float64)
        self._missing = torch.zeros(len(chosen), dtype=torch.float64)
        self._wrong = torch.zeros(len(chosen), dtype=torch.int64)
        self._lowest = torch.full((len(chosen),), NO_UNIT)
        self._highest = torch.full((len(chosen),), -1)
        self._softmax = True

    def add(self, codes: Tensor, errors: Tensor) -> None:
        """Error signals (m, d_out) of slots of these groups (m,)."""
        places = self._place[codes]
        places, errors = places[places >= 0], errors[places >= 0]
        if not len(places):
            return
        least, unit = errors.min(1)
        size = errors.abs().sum(1)
        # Probabilities less one 1: they sum to nothing, and all but the label's are at least 0; but float16 keeps 11 bits of them,
        # and where p is nearly 1 the difference has few bits left
        sums = (errors.sum(1).abs() <= 2e-3 * size + 1e-5) & ((errors < 0).sum(1) <= 1) & (least >= -1.002)
        self._softmax &= bool(sums.all())
        self._sums.index_add_(0, places, errors.double())
        self._missing.index_add_(0, places, -least.clamp(max=0).double())
        self._wrong.index_add_(0, places, (errors.max(1).values > 1 + least).long())
        some = least < 0  # the label of what is learnt to the last bit shows at other visits
        self._lowest.scatter_reduce_(0, places[some], unit[some], "amin")
        self._highest.scatter_reduce_(0, places[some], unit[some], "amax")

    def frame(self, visits: Tensor) -> pl.DataFrame:
        """unit, probability, said, said_probability, wrong; null where the error signals do not tell."""
        count, d_out = self._sums.shape
        unit = self._lowest.clamp(max=d_out - 1)
        others = self._sums.clone()
        others[torch.arange(count), unit] = -torch.inf
        said = others.max(1)
        every = torch.full((count,), self._softmax and d_out > 1)
        one = every & (self._lowest == self._highest)
        columns = {
            "unit": (unit, one),
            "probability": (1 - self._missing / visits, every),
            "said": (said.indices, one),
            "said_probability": (said.values / visits, one),
            "wrong": (self._wrong, every),
        }
        return pl.DataFrame({name: values.numpy() for name, (values, _) in columns.items()}).with_columns(
            pl.when(pl.Series(known.numpy())).then(pl.col(name)).alias(name) for name, (_, known) in columns.items()
        )
