"""Remark 3.5: in a Transformer, softmax attention retrieves among tokens whose projections were themselves retrieved from training.

A projection of the token j has the dual form W x_j = W̃_0 x_j + Σ_t (k_t · x_j) v_t: the first level. A head then adds up values of its
tokens with the shares α_j of its softmax: the second level. Together Σ_j α_j W x_j = W̃_0 x̄ + Σ_t (k_t · x̄) v_t with x̄ = Σ_j α_j x_j, so
what a head takes over from training text is what the mixture of its tokens' vectors attends to. Queries, keys and values are projected
from the same vectors: their first level has the same weights, with other values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import dualform
from dualform.language.terminal import visible
from dualform.language.text import Text
from dualform_paper.figures.results import Reading, Retrieval, Spot
from dualform_paper.language.lexical import Scores, common_ending
from dualform_paper.language.positions import Positions
from dualform_paper.language.queries import Query
from dualform_paper.language.rankings import Retrieved, order, passages, retrieved
from dualform_paper.language.transformer import PLACE, Transformer, layer

TOP, TOKENS = 3, 4
"""So many positions of the training text for each vector, and so many attended tokens, are shown."""
AROUND = 60
"""Characters before and after a position that are shown."""
BEST = 10
"""So many positions are counted as retrieved, in the numbers over many queries."""


class TwoLevels:
    """The two levels of a recorded Transformer."""

    def __init__(self, recording: Path, model: Transformer, text: Text, window: int):
        """model: the architecture; its weights come from the recording. window: how many tokens the model reads."""
        self._dual = dualform.open(recording, model)
        self._text = text
        self._window = window
        trained = self._dual.model()
        assert isinstance(trained, Transformer)
        self.model = trained
        self._positions = [
            Positions(recording, layer(block), PLACE, len(text.train)) for block in range(len(trained.blocks))
        ]

    def read(self, query: Query) -> Tensor:
        """(1, tokens): what the model reads, no longer than its window."""
        prompt = query.prompt(self._text)[-self._window :]
        return torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0)

    @torch.no_grad()
    def answer(self, query: Query) -> Tensor:
        """(vocabulary,): the probabilities of the next token."""
        found: Tensor = self.model(self.read(query))[0, -1].softmax(0)
        return found

    @torch.no_grad()
    def levels(self, query: Query, block: int) -> tuple[Tensor, Tensor]:
        """The second level's shares (heads, tokens) of the last token, and the vectors (tokens, width) that are projected."""
        read = self.read(query)
        vectors = self._dual.attend(read)[layer(block)].queries[0]
        return self.model.shares(read)[block][0, :, -1], vectors

    def first_level(self, vectors: Tensor, block: int) -> Scores:
        """(vectors, positions): key · vector for each position of the training text."""
        return self._positions[block](vectors)

    def look(self, query: Query, block: int) -> Retrieval:
        """Both levels for one query in one block."""
        shares, vectors = self.levels(query, block)
        tokens = tuple(visible(self._text.vocabulary[number]) for number in self.read(query)[0].tolist())
        attended = shares[:, :-1].amax(0).topk(min(TOKENS, len(tokens) - 1)).indices.tolist()
        mixed = shares @ vectors
        scores = self.first_level(torch.cat([vectors[[-1, *attended]], mixed]), block)
        without = [query.position] if query.part == "train" else []
        names = [f"{tokens[-1]}, which asks"]
        names += [
            f"{tokens[place]}, {len(tokens) - 1 - place} before: {100 * float(shares[:, place].max()):.0f} %"
            for place in attended
        ]
        names += [f"head {head}" for head in range(len(mixed))]
        found = [self._reading(name, some, without) for name, some in zip(names, scores, strict=True)]
        return Retrieval(
            tokens,
            shares.double().numpy(),
            found[0],
            dict(zip(attended, found[1 : 1 + len(attended)], strict=True)),
            tuple(found[1 + len(attended) :]),
        )

    def measure(self, queries: Sequence[Query], block: int) -> Levels:
        """Means over queries; `BEST` positions count as retrieved."""
        text, found = self._text, [self.levels(query, block) for query in queries]
        bits = torch.stack([torch.special.entr(shares.double()).sum(1) for shares, _ in found]) / math.log(2)
        back = torch.stack([s.double() @ torch.arange(s.shape[1] - 1, -1, -1).double() for s, _ in found])
        asked, mixed = list[Retrieved](), list[Retrieved]()
        for query, (shares, vectors) in zip(queries, found, strict=True):
            answer = int(self.answer(query).argmax())
            ending = common_ending(text.train.ids, query.prompt(text), most=self._window)
            for number, scores in enumerate(self.first_level(torch.cat([vectors[-1:], shares @ vectors]), block)):
                (mixed if number else asked).append(retrieved(text.train.ids, order(scores, BEST), ending, answer))
        return Levels(
            block,
            bits.mean(0).tolist(),
            back.mean(0).tolist(),
            Retrieved.mean(asked),
            Retrieved.mean(mixed),
        )

    def _reading(self, name: str, scores: Scores, without: Sequence[int]) -> Reading:
        found = []
        for position in passages(scores, TOP, AROUND, without):
            one = self._text.passage(position, AROUND)
            found.append(Spot(one.before, visible(one.token), one.after, one.title, float(scores[position])))
        return Reading(name, tuple(found))


@dataclass(frozen=True)
class Levels:
    """One block, over many queries."""

    block: int
    bits: list[float]
    """The entropy of each head's softmax."""
    back: list[float]
    """How many tokens back each head looks in the mean."""
    asked: Retrieved
    """The first level, for the token that asks."""
    mixed: Retrieved
    """Both levels: for the mixtures that the heads make."""
