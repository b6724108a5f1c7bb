"""Tables 2 to 7, and the same for any query: what attention finds, what the paper found, what a search by the letter finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dualform.language.recorded import RecordedLanguageModel
from dualform.language.text import Text
from dualform_paper.language.lexical import Scores, bm25_of_windows, common_ending
from dualform_paper.language.queries import Query
from dualform_paper.language.rankings import (
    Agreement,
    Places,
    Retrieved,
    agreement,
    order,
    overlooked,
    passages,
    rank_of,
    retrieved,
)

TOP = 3
"""So many passages are shown, as in the paper."""
WINDOW = {"character": 40, "word": 20}
"""Tokens of a document of BM25, of a passage, and how far apart two passages in one answer are at least."""
N_GRAM = {"character": 4, "word": 1}
"""What counts as a term of BM25: words, and stretches of four characters (across word ends)."""
KS = (10, 100, 1000)
OUTSIDE = 1000
"""A negative example is none of the so many positions with the most attention, nor near them."""
BEST = 10
"""So many positions count as retrieved."""
LIKELY = 3
"""So many next tokens are told."""
AROUND = {"character": 60, "word": 90}
"""Characters shown before and after a token."""


@dataclass(frozen=True)
class Place:
    """A position of the training text in an answer."""

    position: int
    title: str
    before: str
    token: str
    after: str
    attention: float
    rank: int
    visits: int
    lexical_rank: int
    """By BM25."""
    ending: int
    """So many tokens up to here are the prompt's last ones."""
    state_rank: int | None
    """Where the token that asks stands: the rank among all such positions by the hidden state's part of the attention alone."""


@dataclass(frozen=True)
class Asked:
    """A query as it stands in its text."""

    part: str
    position: int
    title: str
    before: str
    token: str
    after: str
    table: int | None
    shared: str | None
    """What the paper sees in this query and its passages."""


@dataclass(frozen=True)
class Answer:
    """One query, answered."""

    asked: Asked
    top: list[Place]
    """By attention."""
    theirs: list[Place]
    """The paper's passages, in their order, as our attention ranks them."""
    lexical: list[Place]
    """By BM25."""
    negative: Place | None
    """The best by BM25 that is not attended to."""
    own: Place | None
    """The query itself, where it is of the training text."""
    agreement: dict[str, Agreement]
    """Attention beside "BM25" and beside "common ending"."""
    retrieved: Retrieved
    same: int
    """At so many positions the token that asks stands."""
    likely: list[tuple[str, float]]
    """The model's next tokens, with their probabilities."""


def answer(
    text: Text,
    query: Query,
    attention: Scores,
    state: Scores,
    visits: Places,
    likely: Sequence[tuple[str, float]],
) -> Answer:
    """attention, state (its part of the hidden state), visits (positions,): of the training text. likely: the next tokens, best first.

    A query of the training text is left out of every ranking, with its surroundings.
    """
    ids, prompt, window = text.train.ids, query.prompt(text), WINDOW[text.unit]
    lexical = bm25_of_windows(ids, prompt, window=window, n=N_GRAM[text.unit])
    ending = common_ending(ids, prompt, most=len(prompt))
    same = ids == prompt[-1]
    if query.part == "train":
        same[query.position] = False

    def place(position: int) -> Place:
        one = text.passage(position, AROUND[text.unit])
        ranks = rank_of(attention, position), rank_of(lexical, position)
        alike = rank_of(np.where(same, state, -np.inf), position) if same[position] else None
        return Place(
            position, one.title, one.before, one.token, one.after,
            float(attention[position]), ranks[0], int(visits[position]), ranks[1], int(ending[position]), alike,
        )  # fmt: skip

    own = None
    if query.part == "train":
        own = place(query.position)
        near = slice(max(0, query.position - window + 1), query.position + window)
        attention, lexical, ending = (_without(scores, near) for scores in (attention, lexical, ending))
    asks = text.passage(query.position, AROUND[text.unit], query.part)
    missed = overlooked(lexical, attention, OUTSIDE, window)
    table = query.table
    return Answer(
        Asked(
            query.part, query.position, asks.title, asks.before, asks.token, asks.after,
            table.number if table else None, table.shared if table else None,
        ),
        [place(position) for position in passages(attention, TOP, window)],
        [place(position) for position in query.theirs],
        [place(position) for position in passages(lexical, TOP, window)],
        None if missed is None else place(missed),
        own,
        {
            name: agreement(attention, scores, window, KS)
            for name, scores in (("BM25", lexical), ("common ending", ending))
        },
        retrieved(ids, order(attention, BEST), ending, text.numbers[likely[0][0]]),
        int(same.sum()),
        list(likely),
    )  # fmt: skip


def answered(recorded: RecordedLanguageModel, query: Query) -> Answer:
    """A query put to a recording. Attention is the mean over a position's visits.

    The paper sums over visits. Where all positions have equally many the ranking is the same; else sums would put those first that the
    last, unfinished epoch has visited once more.
    """
    tokens = torch.from_numpy(query.prompt(recorded.text).astype(np.int64))
    by, state = recorded.scores(tokens), recorded.scores(tokens, part="recurrent")
    best = torch.topk(recorded.following(tokens), min(LIKELY, len(recorded.text.vocabulary)))
    likely = [(recorded.text.vocabulary[int(n)], float(p)) for p, n in zip(*best, strict=True)]
    visits = np.maximum(by.visits, 1)
    return answer(recorded.text, query, by.scores / visits, state.scores / visits, by.visits, likely)


def _without(scores: Scores, places: slice) -> Scores:
    left = scores.copy()
    left[places] = -np.inf
    return left
