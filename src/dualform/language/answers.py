"""The answer to a prompt: the training positions that score highest, with the text around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from dualform.arrays import Bools
from dualform.errors import MaskError, QuestionError
from dualform.language.text import Passage, Text
from dualform.query.conditions import evaluate, read_condition

PARTS = {"both": "", "input": ", input part", "recurrent": ", recurrent part"}
"""The parts of keys and query that can be compared, and how an answer mentions them."""
TEXT_COLUMNS = ("token", "title")
"""Columns that conditions can use beside those of the recording; they come from the text."""
WIDTH = 60
"""Characters shown on each side of a token."""
NEXT_TOKENS = 3
"""How many of the most probable next tokens an answer lists."""
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
        """Divide each score by the number of visits to its position."""
        return Scores(self.scores / np.maximum(self.visits, 1), self.visits)


@dataclass(frozen=True)
class RankedPassage:
    """A training position that scores high."""

    rank: int
    score: float
    visits: int
    """How many slots the score sums; 1 for a single slot."""
    step: int | None
    """The step of a single slot."""
    passage: Passage


@dataclass(frozen=True)
class PromptAnswer:
    """A prompt, how the model continues it, and the training passages that it reads from."""

    prompt: str
    score: str
    """What the scores are, in words."""
    query: str
    """The prompt's last token."""
    following: list[tuple[str, float]]
    """The most probable next tokens, with their probabilities."""
    positions: int
    """How many training positions were ranked."""
    passages: list[RankedPassage]
    """Best first."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def check_options(top: int, part: str) -> None:
    """Refuse options that make no sense."""
    if top < 1:
        raise QuestionError(f"top {top}: expected at least 1.")
    if part not in PARTS:
        raise QuestionError(f"part {part!r}: expected one of {', '.join(map(repr, PARTS))}.")


def scores_by_position(text: Text, positions: Ints, totals: Floats, visits: Ints) -> Scores:
    """Spread the scores of some positions over all positions of the training text."""
    every = Scores(np.zeros(len(text.train)), np.zeros(len(text.train), dtype=np.int64))
    every.scores[positions] = totals
    every.visits[positions] = visits
    return every


def highest(scores: Floats, count: int) -> Ints:
    """Return the indices of the highest scores, best first; of equal scores the first ones win."""
    if count >= len(scores):
        return np.argsort(-scores, kind="stable")
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    candidates = np.flatnonzero(~(scores < least))
    return candidates[np.argsort(-scores[candidates], kind="stable")[:count]]


def rank_passages(
    text: Text, by: Scores, top: int, allowed: Bools | None, without: Collection[int], width: int
) -> tuple[list[RankedPassage], int]:
    """Return the best visited positions, and how many positions were ranked.

    allowed: (positions,), None for all; without: positions to leave out.
    """
    ranked = by.visits > 0
    if allowed is not None:
        ranked &= allowed
    ranked[list(without)] = False
    positions = np.flatnonzero(ranked)
    best = positions[highest(by.scores[positions], top)]
    passages = [
        RankedPassage(rank, float(by.scores[position]), int(by.visits[position]), None, text.passage(position, width))
        for rank, position in enumerate(best.tolist(), 1)
    ]
    return passages, len(positions)


def most_probable(text: Text, probabilities: Floats) -> list[tuple[str, float]]:
    """Return the most probable next tokens. probabilities: (vocabulary,)."""
    best = highest(probabilities, NEXT_TOKENS).tolist()
    return [(text.vocabulary[number], float(probabilities[number])) for number in best]


def uses_text_only(column: str, where: str | None) -> bool:
    """Whether a condition uses positions, tokens and titles only, and no other column of the recording."""
    return where is None or _columns_of(where) <= {column, *TEXT_COLUMNS}


def _columns_of(where: str) -> set[str]:
    return set(read_condition(where, "where").meta.root_names())


def split_condition(
    text: Text, column: str, others: Sequence[str], where: str | None
) -> tuple[Bools | None, str | None]:
    """Turn a condition into a mask over positions, (positions,), or return it as a condition on the recording.

    column: the recording's column of positions; others: its other columns.
    """
    if where is None:
        return None, None
    if uses_text_only(column, where):
        return evaluate(read_condition(where, "where"), _token_table(text, column), "where"), None

    used = _columns_of(where)
    known = [column, *TEXT_COLUMNS, "step", *others]
    unknown = sorted(used - set(known))
    if unknown:
        raise MaskError(f"where: there is no column {', '.join(map(repr, unknown))}. Columns: {', '.join(known)}.")
    if not used.isdisjoint(TEXT_COLUMNS):
        recorded = ", ".join(sorted(used.difference(TEXT_COLUMNS)))
        raise MaskError(f"where: conditions on token or title do not go together with {recorded}.")
    return None, where


def _token_table(text: Text, column: str) -> pl.DataFrame:
    """One line for each token of the training text: its position, the token and its title."""
    train = text.train
    lengths = np.diff([0, *train.starts, len(train)])
    title_numbers = np.repeat(np.arange(len(lengths)), lengths)
    return pl.DataFrame(
        {
            column: np.arange(len(train)),
            "token": pl.Series(text.vocabulary)[train.ids],
            "title": pl.Series(["", *train.titles])[title_numbers],
        }
    )
