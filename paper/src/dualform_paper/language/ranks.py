"""The ranks of the paper's passages, measured again and again while a model is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualform.language.recorded import RecordedLanguageModel
from dualform.language.text import Text
from dualform_paper.language.queries import Query, papers
from dualform_paper.language.rankings import rank_of
from dualform_paper.language.recording import Measure
from dualform_paper.language.tables import WINDOW
from dualform_paper.section import Section

PAPER_TOP = 3
"""Passages that a table of the paper shows."""


@dataclass(frozen=True)
class Ranks:
    """How one query ranks the passages that the paper found for it, in the paper's order."""

    table: int
    token: str
    """The token that asks."""
    by_attention: list[int]
    """Among all positions, by the mean attention weight of their visits."""
    by_state: list[int]
    """The same by the hidden state's part of the attention alone."""
    same_token_by_state: list[int]
    """The same among the positions where the passage's token stands."""


def measure_ranks(text: Text) -> Measure | None:
    """A function that ranks the paper's passages in a recording of this text; None for a text without such passages."""
    queries = papers(text, variants=True)
    if not queries:
        return None

    def measure(folder: Path) -> list[dict[str, Any]]:
        recorded = RecordedLanguageModel(folder)
        return [asdict(ranks(recorded, query)) for query in queries]

    return measure


def ranks(recorded: RecordedLanguageModel, query: Query) -> Ranks:
    """The ranks of a query's passages. A query of the training text takes no part in them, nor do its surroundings."""
    assert query.table is not None
    text = recorded.text
    tokens = torch.from_numpy(query.prompt(text).astype(np.int64))
    whole = recorded.scores(tokens).means().scores
    state = recorded.scores(tokens, part="recurrent").means().scores
    if query.part == "train":
        window = WINDOW[text.unit]
        near = slice(max(0, query.position - window + 1), query.position + window)
        whole[near] = -np.inf
        state[near] = -np.inf
    same_token = []
    for position in query.theirs:
        alike = text.train.ids == text.train.ids[position]
        same_token.append(rank_of(np.where(alike, state, -np.inf), position))
    return Ranks(
        query.table.number,
        text.vocabulary[int(tokens[-1])],
        [rank_of(whole, position) for position in query.theirs],
        [rank_of(state, position) for position in query.theirs],
        same_token,
    )


def section(measured: Sequence[tuple[int, Any]]) -> Section | None:
    """The ranks against the steps of training, as a figure; None if nothing was measured."""
    if not measured:
        return None
    curves: dict[str, dict[str, list[float]]] = {}
    for step, queries in measured:
        for query in queries:
            for number, rank in enumerate(query["by_attention"], 1):
                name = f"Table {query['table']} at “{query['token']}”, passage {number}"
                curve = curves.setdefault(name, {"x": [], "y": []})
                curve["x"].append(step)
                curve["y"].append(rank)
    best = _among_the_best(measured[-1][1])
    said = (
        f"At each checkpoint the paper's queries were put to the model and its totals of that moment. The figure shows the ranks of the "
        f"paper's passages by attention, among all positions of the training text. At the end, {best}."
    )
    data = {"axes": {"x": "step", "y": "rank", "log_y": True}, "curves": curves, "measured": list(measured)}
    return Section("Ranks during training", said, data)


def _among_the_best(queries: Sequence[dict[str, Any]]) -> str:
    every = [rank for query in queries for rank in query["by_attention"]]
    count = sum(rank <= PAPER_TOP for rank in every)
    return f"{count} of {len(every)} have a rank of at most {PAPER_TOP}"
