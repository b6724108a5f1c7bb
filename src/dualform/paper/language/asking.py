"""Putting prompts to a recorded language model: which training positions does its LSTM read from?"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

import dualform
from dualform.errors import NotRecordedError, QuestionError
from dualform.paper.language import asked, beside
from dualform.paper.language.asked import PARTS, WIDTH, Asked, Found, Scores
from dualform.query.answers import Answer, Sums
from dualform.query.masks import Bools, read_condition

GATES = ("i", "f", "g", "o")


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
        asked.check(top, part)
        tokens = self.text.encode(prompt)
        likely = self.following(tokens)
        column = self._beside.column
        others = [c.name for c in self.dual.store.manifest.columns if c.name != column]
        here, recorded = asked.conditions(self.text, column, others, where)
        if gate is not None or target is not None:
            unit = int(likely.argmax()) if target is None else self._token(target)
            what = f"contribution to the logit of {self.text.vocabulary[unit]!r}" + (
                f" through gate {gate}" if gate else ""
            )
            answer: Answer = self._contributions(tokens, unit, part, gate)
        else:
            what, answer = "attention weight", self._attention(tokens, part)
        what += PARTS[part]
        if slots:
            found = self._single(answer, top, self._only(here, recorded, without), absolute, width)
            count = len(self.text.train) if here is None else int(here.sum())
        else:
            by = self._by_position(answer.sums(column, where=recorded, absolute=absolute))
            found, count = asked.passages(self.text, by.means() if mean else by, top, here, without, width)
            what += f", {'mean' if mean else 'sum'}{' of sizes' if absolute else ''} over visits"
        following = asked.following(self.text, likely.numpy())
        return Asked(prompt, what, self.text.vocabulary[int(tokens[-1])], following, count, found)

    # Inside

    def _attention(self, tokens: Tensor, part: str) -> Answer:
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
        return asked.by_position(self.text, places, sums.totals[0].numpy(), sums.visits.numpy())

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
        ours = pl.col(self._beside.column).is_in(pl.Series(np.flatnonzero(taken)).implode())
        return ours if recorded is None else ours & read_condition(recorded, "where")
