"""What a prompt is answered with: the training positions that score highest, with the text around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from dualform.errors import MaskError, QuestionError
from dualform.paper.language.text import Passage, Text
from dualform.query.masks import Bools, evaluate, read_condition

PARTS = {"both": "", "input": ", input part", "recurrent": ", recurrent part"}
"""The parts of keys and query that may be compared, and what is said of them."""
WIDTH = 60
"""Characters shown on each side of a token."""
NEXT = 3
"""So many of the most probable next tokens are told."""
Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Scores:
    """A score for each training position, and how many slots it sums."""

    scores: Floats
    """(positions,); 0 where a position was never visited."""
    visits: Ints
    """(positions,)"""

    def means(self) -> Scores:
        """Over the visits of a position, instead of their sum."""
        return Scores(self.scores / np.maximum(self.visits, 1), self.visits)


@dataclass(frozen=True)
class Found:
    """A training position that scores high."""

    rank: int
    score: float
    visits: int
    """How many slots the score sums; 1 for a single slot."""
    step: int | None
    """Of a single slot."""
    passage: Passage


@dataclass(frozen=True)
class Asked:
    """A prompt, what the model goes on with, and the training passages it reads from."""

    prompt: str
    score: str
    """What the scores are."""
    query: str
    """The prompt's last token."""
    following: list[tuple[str, float]]
    """The most probable next tokens, with their probabilities."""
    positions: int
    """How many training positions took part."""
    found: list[Found]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def check(top: int, part: str) -> None:
    """Refuse what makes no sense."""
    if top < 1:
        raise QuestionError(f"top {top}: expected at least 1.")
    if part not in PARTS:
        raise QuestionError(f"part {part!r}: expected one of {', '.join(map(repr, PARTS))}.")


def by_position(text: Text, places: Ints, totals: Floats, visits: Ints) -> Scores:
    """The scores of some positions as those of all."""
    found = Scores(np.zeros(len(text.train)), np.zeros(len(text.train), dtype=np.int64))
    found.scores[places], found.visits[places] = totals, visits
    return found


def highest(scores: Floats, count: int) -> Ints:
    """The places of the highest, best first; ties go to the lower place."""
    if count >= len(scores):
        return np.argsort(-scores, kind="stable")
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    places = np.flatnonzero(~(scores < least))
    return places[np.argsort(-scores[places], kind="stable")[:count]]


def passages(
    text: Text, by: Scores, top: int, here: Bools | None, without: Collection[int], width: int
) -> tuple[list[Found], int]:
    """The best positions among those visited (and `here`, and not left out), and how many took part."""
    taken = by.visits > 0 if here is None else (by.visits > 0) & here
    taken[list(without)] = False
    places = np.flatnonzero(taken)
    found = [
        Found(rank, float(by.scores[place]), int(by.visits[place]), None, text.passage(place, width))
        for rank, place in enumerate(places[highest(by.scores[places], top)].tolist(), 1)
    ]
    return found, len(places)


def following(text: Text, shares: Floats) -> list[tuple[str, float]]:
    """The most probable next tokens. shares: (vocabulary,) probabilities."""
    return [(text.vocabulary[number], float(shares[number])) for number in highest(shares, NEXT).tolist()]


def of_positions(column: str, where: str | None) -> bool:
    """Whether a condition is about positions and their tokens and titles, not about other columns of the recording."""
    return where is None or _used(where) <= {column, "token", "title"}


def _used(where: str) -> set[str]:
    return set(read_condition(where, "where").meta.root_names())


def conditions(text: Text, column: str, others: Sequence[str], where: str | None) -> tuple[Bools | None, str | None]:
    """Which positions take part, (positions,), or a condition on the recording's own columns.

    column: the recording's column of positions; others: its other columns.
    """
    if where is None:
        return None, None
    if not of_positions(column, where):
        used, ours = _used(where), {"token", "title"}
        known = [column, "token", "title", "step", *others]
        unknown = sorted(used - set(known))
        if unknown:
            raise MaskError(f"where: there is no column {', '.join(map(repr, unknown))}. Columns: {', '.join(known)}.")
        if used & ours:
            raise MaskError(f"where: conditions on token or title do not go together with {', '.join(used - ours)}.")
        return None, where
    train = text.train
    lengths = np.diff([0, *train.starts, len(train)])
    table = pl.DataFrame(
        {
            column: np.arange(len(train)),
            "token": pl.Series(text.vocabulary)[train.ids],
            "title": pl.Series(["", *train.titles])[np.repeat(np.arange(len(lengths)), lengths)],
        }
    )
    return evaluate(read_condition(where, "where"), table, "where"), None
