"""Putting prompts to a recorded language model: which training positions does its LSTM read from?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

import dualform
from dualform.errors import MaskError, NotRecordedError, QuestionError
from dualform.paper.language import beside
from dualform.paper.language.text import Passage
from dualform.query.answers import Answer, Sums
from dualform.query.masks import evaluate, read_condition
from dualform.query.ranking import Best

PARTS = ("both", "input", "recurrent")
GATES = ("i", "f", "g", "o")
WIDTH = 60
"""Characters shown on each side of a token."""
NEXT = 3
"""So many of the most probable next tokens are told."""
Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Scores:
    """A score for each training position, and how many slots it sums."""

    scores: Floats
    """(positions,); 0 where a position was never visited."""
    visits: Ints
    """(positions,)"""


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


class Recorded:
    """A recorded language model with its text."""

    def __init__(self, folder: Path):
        self._beside = beside.read(folder)
        self.text = self._beside.text
        self.dual = dualform.open(folder, self._beside.model())
        self._vectors = dualform.open(folder)
        self._model = self.dual.primal()

    def following(self, tokens: Tensor) -> Tensor:
        """(vocabulary,): the probabilities of the token after a prompt."""
        with torch.no_grad():
            return torch.softmax(self._model(tokens[None])[0][0, -1], 0)

    def scores(self, tokens: Tensor, *, part: str = "both", where: str | None = None, absolute: bool = False) -> Scores:
        """The attention weight that each training position has, summed over its visits, for a prompt's last token.

        part: of "both" input and previous hidden state, or of "input" or "recurrent" alone. absolute: sums of sizes, as the
        authors' code has them; these need slots.
        """
        attention = self._attention(tokens, part)
        return self._by_position(attention.sums(self._beside.column, where=where, absolute=absolute))

    def contributions(
        self, tokens: Tensor, target: int, *, part: str = "both", gate: str | None = None, where: str | None = None
    ) -> Scores:
        """What each training position adds to the logit of a next token through the LSTM, to first order; needs slots.

        gate: through one of the gates alone.
        """
        split = self._contributions(tokens, target, part, gate)
        return self._by_position(split.sums(self._beside.column, where=where))

    def ask(
        self,
        prompt: str,
        *,
        top: int = 10,
        where: str | None = None,
        part: str = "both",
        gate: str | None = None,
        target: str | None = None,
        absolute: bool = False,
        mean: bool = False,
        slots: bool = False,
        width: int = WIDTH,
        without: Collection[int] = (),
    ) -> Asked:
        """The training passages with the highest scores.

        where: SQL over text_position, token and title, or over the columns of the recording. gate, target: scores are
        contributions to the logit of a next token (default: the most probable one), through one gate. mean: over the visits of a
        position, instead of their sum. slots: single slots. without: positions to leave out.
        """
        if top < 1:
            raise QuestionError(f"top {top}: expected at least 1.")
        tokens = self.text.encode(prompt)
        likely = self.following(tokens)
        best = torch.topk(likely, min(NEXT, len(likely)))
        following = [(self.text.vocabulary[int(n)], float(p)) for p, n in zip(*best, strict=True)]
        here, recorded = self._conditions(where)
        if gate is not None or target is not None:
            unit = int(best.indices[0]) if target is None else self._token(target)
            what = f"contribution to the logit of {self.text.vocabulary[unit]!r}" + (
                f" through gate {gate}" if gate else ""
            )
            answer: Answer = self._contributions(tokens, unit, part, gate)
        else:
            what, answer = "attention weight", self._attention(tokens, part)
        what += {"both": "", "input": ", input part", "recurrent": ", recurrent part"}[part]
        if slots:
            found = self._single(answer, top, self._only(here, recorded, without), absolute, width)
            count = len(self.text.train) if here is None else int(here.sum())
        else:
            by_position = self._by_position(answer.sums(self._beside.column, where=recorded, absolute=absolute))
            if mean:
                means = by_position.scores / np.maximum(by_position.visits, 1)
                by_position = Scores(means, by_position.visits)
            found, count = self._summed(by_position, top, here, without, width)
            what += f", {'mean' if mean else 'sum'}{' of sizes' if absolute else ''} over visits"
        return Asked(prompt, what, self.text.vocabulary[int(tokens[-1])], following, count, found)

    # Inside

    def _attention(self, tokens: Tensor, part: str) -> Answer:
        if part not in PARTS:
            raise QuestionError(f"part {part!r}: expected one of {', '.join(map(repr, PARTS))}.")
        name = self._beside.layer
        query = self.dual.attend(tokens[None])[name].queries[:, -1]
        return self._vectors.attend({name: query})[name].part(part)

    def _contributions(self, tokens: Tensor, target: int, part: str, gate: str | None) -> Answer:
        if self.dual.store.manifest.keep != "slots":
            raise NotRecordedError(
                f"contributions need error signals, and {self.dual.store.folder} keeps {self.dual.store.manifest.keep} only. "
                f"Record with all slots."
            )
        if gate is not None and gate not in GATES:
            raise QuestionError(f"gate {gate!r}: expected one of {', '.join(map(repr, GATES))}.")
        split = self.dual.contributions(tokens[None], target=lambda output: output[0][:, -1, target])
        answer = split[self._beside.layer].part(part)
        return answer if gate is None else answer.gate(gate)

    def _token(self, token: str) -> int:
        tokens = self.text.encode(token)
        if len(tokens) != 1:
            raise QuestionError(f"target {token!r}: expected one {self.text.unit}.")
        return int(tokens[0])

    def _by_position(self, sums: Sums) -> Scores:
        places = sums.values[self._beside.column].to_numpy()
        scores = np.zeros(len(self.text.train))
        visits = np.zeros(len(self.text.train), dtype=np.int64)
        scores[places], visits[places] = sums.totals[0].numpy(), sums.visits.numpy()
        return Scores(scores, visits)

    def _conditions(self, where: str | None) -> tuple[Bools | None, str | None]:
        """Which positions take part, (positions,), or a condition on the recording's own columns."""
        if where is None:
            return None, None
        condition = read_condition(where, "where")
        column, used, ours = self._beside.column, set(condition.meta.root_names()), {"token", "title"}
        if not used <= {column, *ours}:
            known = [column, "token", "title", "step"]
            known += [c.name for c in self.dual.store.manifest.columns if c.name != column]
            unknown = sorted(used - set(known))
            if unknown:
                raise MaskError(
                    f"where: there is no column {', '.join(map(repr, unknown))}. Columns: {', '.join(known)}."
                )
            if used & ours:
                raise MaskError(
                    f"where: conditions on token or title do not go together with {', '.join(used - ours)}."
                )
            return None, where
        train = self.text.train
        lengths = np.diff([0, *train.starts, len(train)])
        table = pl.DataFrame(
            {
                column: np.arange(len(train)),
                "token": pl.Series(self.text.vocabulary)[train.ids],
                "title": pl.Series(["", *train.titles])[np.repeat(np.arange(len(lengths)), lengths)],
            }
        )
        return evaluate(condition, table, "where"), None

    def _summed(
        self, by: Scores, top: int, here: Bools | None, without: Collection[int], width: int
    ) -> tuple[list[Found], int]:
        taken = by.visits > 0 if here is None else (by.visits > 0) & here
        taken[list(without)] = False
        places = np.flatnonzero(taken)
        scores = torch.from_numpy(by.scores[places])[None]
        best = Best(1, top, torch.float64)
        best.add(scores, torch.from_numpy(places), scores)
        found = [
            Found(rank, score, int(by.visits[place]), None, self.text.passage(place, width))
            for rank, (place, score) in enumerate(
                zip(best.numbers[0].tolist(), best.values[0].tolist(), strict=True), 1
            )
        ]
        return found, len(places)

    def _single(self, answer: Answer, top: int, where: pl.Expr | str | None, absolute: bool, width: int) -> list[Found]:
        frame = answer.top(top, where=where, absolute=absolute)
        rows = frame.select("rank", answer.value, "step", self._beside.column).rows()
        return [Found(rank, score, 1, step, self.text.passage(place, width)) for rank, score, step, place in rows]

    def _only(self, here: Bools | None, recorded: str | None, without: Collection[int]) -> pl.Expr | str | None:
        """Both kinds of conditions in one, for single slots."""
        if here is None and not without:
            return recorded
        taken = np.ones(len(self.text.train), dtype=bool) if here is None else here.copy()
        taken[list(without)] = False
        return pl.col(self._beside.column).is_in(pl.Series(np.flatnonzero(taken)).implode())
