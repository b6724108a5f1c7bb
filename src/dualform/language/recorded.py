"""Put prompts to a recorded language model: which training positions does its LSTM read from?"""

from __future__ import annotations

import os
from collections.abc import Collection

import numpy as np
import polars as pl
import torch
from torch import Tensor

import dualform
from dualform.arrays import Bools
from dualform.errors import NotRecordedError, QuestionError
from dualform.language import answers
from dualform.language.answers import PARTS, WIDTH, PromptAnswer, RankedPassage, Scores
from dualform.language.description import read_description
from dualform.query.answer import Answer, Sums
from dualform.query.conditions import read_condition

GATES = ("i", "f", "g", "o")


class RecordedLanguageModel:
    """A recorded language model with its text."""

    def __init__(self, path: str | os.PathLike[str]):
        self._description = read_description(path)
        self.text = self._description.text
        self.dual = dualform.open(path, self._description.model())
        self._vectors = dualform.open(path)
        self._model = self.dual.model()

    def following(self, tokens: Tensor) -> Tensor:
        """Return the probabilities of the token after a prompt, (vocabulary,)."""
        with torch.no_grad():
            return torch.softmax(self._model(tokens[None])[0][0, -1], 0)

    def scores(self, tokens: Tensor, *, part: str = "both", where: str | None = None, absolute: bool = False) -> Scores:
        """The attention weight of each training position, summed over its visits, for a prompt's last token.

        part: of "both" input and previous hidden state, or of "input" or "recurrent" alone. absolute: sums of sizes, as the
        authors' code has them; these need slots.
        """
        attention = self._attention(tokens, part)
        return self._by_position(attention.sums(self._description.column, where=where, absolute=absolute))

    def contributions(
        self, tokens: Tensor, target: int, *, part: str = "both", gate: str | None = None, where: str | None = None
    ) -> Scores:
        """What each training position adds to the logit of a next token through the LSTM, to first order; needs slots.

        gate: through one of the gates alone.
        """
        contributions = self._contributions(tokens, target, part, gate)
        return self._by_position(contributions.sums(self._description.column, where=where))

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
    ) -> PromptAnswer:
        """Return the training passages with the highest scores.

        where: SQL over text_position, token and title, or over the columns of the recording. gate, target: scores are
        contributions to the logit of a next token (default: the most probable one), through one gate. mean: over the visits of a
        position, instead of their sum. slots: single slots. without: positions to leave out.
        """
        answers.check_options(top, part)
        tokens = self.text.encode(prompt)
        probabilities = self.following(tokens)
        column = self._description.column
        others = [c.name for c in self.dual.store.manifest.columns if c.name != column]
        allowed, recorded = answers.split_condition(self.text, column, others, where)

        answer: Answer
        if gate is None and target is None:
            score = "attention weight"
            answer = self._attention(tokens, part)
        else:
            unit = int(probabilities.argmax()) if target is None else self._token(target)
            score = f"contribution to the logit of {self.text.vocabulary[unit]!r}"
            if gate:
                score += f" through gate {gate}"
            answer = self._contributions(tokens, unit, part, gate)
        score += PARTS[part]

        if slots:
            only = self._slot_condition(allowed, recorded, without)
            passages = self._single_slots(answer, top, only, absolute, width)
            count = len(self.text.train) if allowed is None else int(allowed.sum())
        else:
            by = self._by_position(answer.sums(column, where=recorded, absolute=absolute))
            if mean:
                by = by.means()
            passages, count = answers.rank_passages(self.text, by, top, allowed, without, width)
            score += f", {'mean' if mean else 'sum'}{' of sizes' if absolute else ''} over visits"
        following = answers.most_probable(self.text, probabilities.numpy())
        return PromptAnswer(prompt, score, self.text.vocabulary[int(tokens[-1])], following, count, passages)

    def _attention(self, tokens: Tensor, part: str) -> Answer:
        name = self._description.layer
        query = self.dual.attend(tokens[None])[name].queries[:, -1]
        return self._vectors.attend({name: query})[name].part(part)

    def _contributions(self, tokens: Tensor, target: int, part: str, gate: str | None) -> Answer:
        if not self.dual.store.manifest.keeps_gradients:
            raise NotRecordedError(
                f"contributions need error signals, and {self.dual.store.location} keeps {self.dual.store.manifest.keep} only. "
                f"Record with all slots."
            )
        if gate is not None and gate not in GATES:
            raise QuestionError(f"gate {gate!r}: expected one of {', '.join(map(repr, GATES))}.")
        by_layer = self.dual.contributions(tokens[None], target=lambda output: output[0][:, -1, target])
        answer = by_layer[self._description.layer].part(part)
        return answer if gate is None else answer.gate(gate)

    def _token(self, token: str) -> int:
        tokens = self.text.encode(token)
        if len(tokens) != 1:
            raise QuestionError(f"target {token!r}: expected one {self.text.unit}.")
        return int(tokens[0])

    def _by_position(self, sums: Sums) -> Scores:
        positions = sums.values[self._description.column].to_numpy()
        return answers.scores_by_position(self.text, positions, sums.totals[0].numpy(), sums.visits.numpy())

    def _single_slots(
        self, answer: Answer, top: int, where: pl.Expr | str | None, absolute: bool, width: int
    ) -> list[RankedPassage]:
        frame = answer.top(top, where=where, absolute=absolute)
        rows = frame.select("rank", answer.value, "step", self._description.column).rows()
        return [
            RankedPassage(rank, score, 1, step, self.text.passage(position, width))
            for rank, score, step, position in rows
        ]

    def _slot_condition(
        self, allowed: Bools | None, recorded: str | None, without: Collection[int]
    ) -> pl.Expr | str | None:
        """Join the condition on positions and the condition on the recording into one, for single slots."""
        if allowed is None and not without:
            return recorded
        chosen = np.ones(len(self.text.train), dtype=bool) if allowed is None else allowed.copy()
        chosen[list(without)] = False
        positions = pl.Series(np.flatnonzero(chosen)).implode()
        condition = pl.col(self._description.column).is_in(positions)
        return condition if recorded is None else condition & read_condition(recorded, "where")
