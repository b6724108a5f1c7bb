"""Two rankings of the training text's positions: the best places of each, and how far they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import polars as pl

from dualform_paper.language.lexical import Flags, Ints, Scores

Places = np.ndarray[Any, np.dtype[np.int64]]


def order(scores: Scores, k: int) -> Places:
    """The k best positions, best first; ties go to the earlier one."""
    k = min(k, len(scores))
    if k == 0:
        return np.zeros(0, dtype=np.int64)
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above, level = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    found = np.concatenate([above, level[: k - len(above)]])
    return found[np.argsort(-scores[found], kind="stable")]


def rank_of(scores: Scores, position: int) -> int:
    """1 for the best."""
    ahead = np.count_nonzero(scores > scores[position])
    return int(ahead + np.count_nonzero(scores[:position] == scores[position])) + 1


def passages(scores: Scores, k: int, apart: int, without: Sequence[int] = ()) -> list[int]:
    """The k best positions of which no two are closer than `apart`; ties go to the earlier one. without: positions left out."""
    left, found = scores.astype(np.float64), list[int]()
    left[list(without)] = -np.inf
    for _ in range(k):
        if not len(left) or np.isneginf(left[best := int(left.argmax())]):
            break
        found.append(best)
        left[max(0, best - apart + 1) : best + apart] = -np.inf
    return found


def overlooked(scores: Scores, attention: Scores, k: int, window: int, without: Sequence[int] = ()) -> int | None:
    """The best position by `scores` in whose window none of the k most attended positions lies: a negative example."""
    near: Flags = np.zeros(len(scores), dtype=bool)
    for position in order(attention, k).tolist():
        near[max(0, position - window + 1) : position + window] = True
    found = passages(np.where(near, -np.inf, scores), 1, 1, without)
    return found[0] if found else None


@dataclass(frozen=True)
class Agreement:
    """How far two rankings of passages agree. A passage is a stretch of the text; its score is the highest of its positions."""

    passages: int
    overlap: dict[int, float]
    """By k: the share of the k best passages that are among the k best of the other."""
    correlation: float
    """Spearman's, over all passages; nan where one of them does not tell any two apart."""


def agreement(one: Scores, other: Scores, length: int, ks: Sequence[int]) -> Agreement:
    """Of two scores of the same positions, (positions,), in passages of `length`."""
    starts = np.arange(0, len(one), length)
    mine, its = (np.maximum.reduceat(scores, starts) for scores in (one, other))
    overlap = {k: len(np.intersect1d(order(mine, k), order(its, k))) / k for k in ks}
    spearman = pl.select(pl.corr(pl.Series(mine), pl.Series(its), method="spearman")).item()
    return Agreement(len(starts), overlap, float("nan") if spearman is None else float(spearman))


@dataclass(frozen=True)
class Retrieved:
    """What stands at the positions with the most attention."""

    same_token: float
    """The share of them where the token that asks stands."""
    ending: float
    """How many tokens up to the position are the prompt's last ones, in the mean."""
    answer: float
    """The share of them after which the model's answer stands."""

    @staticmethod
    def mean(several: Sequence[Retrieved]) -> Retrieved:
        """Over queries."""
        columns = zip(*(astuple(one) for one in several), strict=True)
        return Retrieved(*(sum(column) / len(several) for column in columns))


def retrieved(ids: Ints, best: Places, ending: Scores, answer: int) -> Retrieved:
    """ids (positions,): the training text; ending: common with the prompt at each position, as common_ending() gives it."""
    after = ids[np.minimum(best + 1, len(ids) - 1)]
    return Retrieved(
        *(float(some.mean()) if len(best) else 0.0 for some in (ending[best] > 0, ending[best], after == answer))
    )
