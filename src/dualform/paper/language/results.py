"""From a recorded language model to results.json, figures and page: every query answered, beside the paper's and BM25's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dualform
from dualform.figures import lines
from dualform.figures.results import Line, Lines
from dualform.paper.language.asking import Recorded
from dualform.paper.language.queries import Query, chosen, papers
from dualform.paper.language.recording import TRAINED, Progress
from dualform.paper.language.report import page
from dualform.paper.language.tables import Answer, answer
from dualform.paper.language.training import bits, perplexity

CHOSEN, SHOWN = 20, 6
"""So many queries are chosen by the rule, and so many of them are shown in full."""
LIKELY = 3
"""So many next tokens are told."""


def report(
    folder: Path,
    out: Path,
    *,
    command: str,
    count: int = CHOSEN,
    others: Sequence[str] = (),
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Ask a finished recording and write everything into `out`; gives the page. others: further sections, in Markdown."""
    recorded = Recorded(folder)
    text, trained = recorded.text, json.loads((folder / TRAINED).read_text())
    queries = [*papers(text), *chosen(text, count)]
    answers = []
    for number, query in enumerate(queries):
        progress("asking", number, len(queries))
        answers.append(answered(recorded, query))
    progress("asking", len(queries), len(queries))
    visits = recorded.scores(_tokens(recorded, queries[0])).visits if queries else np.zeros(1, dtype=np.int64)
    found: dict[str, Any] = {
        "dualform": dualform.__version__,
        "torch": str(torch.__version__),
        "command": command,
        "text": {
            "name": text.name,
            "unit": text.unit,
            "vocabulary": len(text.vocabulary),
            "train": len(text.train),
            "test": len(text.test),
        },
        "settings": trained["settings"],
        "trained": {key: value for key, value in trained.items() if key != "settings"},
        "epochs": trained["steps"] * trained["settings"]["batch"] * trained["settings"]["window"] / len(text.train),
        "visits": {"least": int(visits.min()), "most": int(visits.max())},
        "shown": SHOWN,
        "answers": [asdict(one) for one in answers],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(found, indent=1))
    return write_page(out, others)


def answered(recorded: Recorded, query: Query) -> Answer:
    """One query put to a recording."""
    tokens = _tokens(recorded, query)
    by = recorded.scores(tokens)
    best = torch.topk(recorded.following(tokens), min(LIKELY, len(recorded.text.vocabulary)))
    likely = [(recorded.text.vocabulary[int(n)], float(p)) for p, n in zip(*best, strict=True)]
    return answer(recorded.text, query, by.scores / np.maximum(by.visits, 1), by.visits, likely)


def write_page(out: Path, others: Sequence[str] = ()) -> Path:
    """The page and its figure, from results.json."""
    found = json.loads((out / "results.json").read_text())
    (out / "figures").mkdir(exist_ok=True)
    draw(found, out / "figures" / "training")
    (out / "index.md").write_text(page(found, found["command"], others))
    return out / "index.md"


def draw(found: dict[str, Any], stem: Path) -> None:
    """The learning curve."""
    of_characters = found["text"]["unit"] == "character"
    scale = bits if of_characters else perplexity
    curves = {"training": found["trained"]["losses"], "test text (its beginning)": found["trained"]["curve"]}
    series = tuple(
        Line(name, np.array([step for step, _ in points]), np.array([scale(nats) for _, nats in points]))
        for name, points in curves.items()
    )
    panel = Lines("", "step", "bits a character" if of_characters else "perplexity", series, log_y=not of_characters)
    lines.save([panel], "Loss", stem)


def _tokens(recorded: Recorded, query: Query) -> torch.Tensor:
    return torch.from_numpy(query.prompt(recorded.text).astype(np.int64))
