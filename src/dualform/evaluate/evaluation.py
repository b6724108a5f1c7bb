"""`dualform.evaluate`: train again on parts of the data, and see which of a run's answers foretold the outcome."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from dualform.errors import QuestionError
from dualform.evaluate.lds import Interval, Lds, Truth
from dualform.evaluate.ranks import spearman
from dualform.evaluate.retrain import Estimate, Retrained, trainings_folder
from dualform.evaluate.scored import chosen, scored
from dualform.evaluate.study import Study
from dualform.evaluate.subsets import Subsets
from dualform.evaluate.views import View, samples_of
from dualform.progress import Progress
from dualform.query.dual import Dual, open

KINDS = {"attention": "attention", "contribution": "contribution"} | dict.fromkeys(
    ("whitened", "kernel", "sketch"), "influence"
)


@dataclass(frozen=True)
class Evaluation:
    """How well each view foretold what training on parts of the data gives."""

    frame: pl.DataFrame
    """view, kind, lds, low, high (95 % bootstrap interval over examples and subsets), seconds for all test examples, why not"""
    lds: dict[str, Lds]
    ceiling: float | None
    """The LDS that retraining noise allows; None where each subset was trained on once."""
    likeness: float
    """Spearman's correlation over test examples between the recorded model and those trained again: low if these are other models."""
    subsets: int
    repeats: int
    fraction: float
    samples: int
    examples: int

    def ratio(self, view: str, other: str) -> Interval:
        """How many times the LDS of another view this view has."""
        return self.lds[view].ratio(self.lds[other])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for scripts."""
        names = ("ceiling", "likeness", "subsets", "repeats", "fraction", "samples", "examples")
        return {"views": self.frame.to_dicts(), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class Evaluator:
    """What an evaluation will do; `estimate()` says how long, `run()` does it."""

    dual: Dual
    study: Study
    retrained: Retrained
    subsets: Subsets
    views: dict[str, View]

    def estimate(self) -> Estimate:
        """How many trainings are still to do, and about how long they take. Does one or two of them."""
        return self.retrained.estimate(self.subsets.jobs())

    def run(self, progress: Progress | None = None) -> Evaluation:
        """Train what is not in the folder yet, and score the views."""
        flat = self.retrained.outcomes(self.subsets.jobs(), progress)
        truth = Truth(self.subsets.kept(), self.subsets.outcomes(flat))
        lds: dict[str, Lds] = {}
        lines = []
        for one in scored(self.views, self.dual, self.study, progress):
            found: dict[str, float | None] = dict.fromkeys(("value", "low", "high"))
            if one.scores is not None:
                lds[one.view] = truth.lds(one.scores)
                found |= asdict(lds[one.view].interval)
            lines.append(
                {"view": one.view, "kind": KINDS.get(one.view, "peer"), "lds": found.pop("value"), **found}
                | {"seconds": one.seconds, "why": one.why}
            )
        now = self.study.judge(self.dual.model())
        return Evaluation(
            frame=pl.DataFrame(lines, schema_overrides={"lds": pl.Float64, "low": pl.Float64, "why": pl.String}),
            lds=lds,
            ceiling=truth.ceiling(),
            likeness=float(spearman(now, truth.outcomes.mean((0, 1)))),
            subsets=self.subsets.count,
            repeats=self.subsets.repeats,
            fraction=self.subsets.fraction,
            samples=len(self.subsets.ids),
            examples=len(now),
        )


def prepare(
    run: str | os.PathLike[str] | Dual,
    study: Study,
    *,
    out: str | os.PathLike[str] | None = None,
    subsets: int = 50,
    repeats: int = 2,
    fraction: float = 0.5,
    views: Sequence[str] | None = None,
    workers: int = 1,
    seed: int = 0,
) -> Evaluator:
    """As evaluate(), but nothing is trained yet: ask `.estimate()` first, then `.run()`."""
    dual = run if isinstance(run, Dual) else open(run, study.model)
    folder = trainings_folder(dual.store.location, out)
    if workers < 1:
        raise QuestionError(f"workers={workers}: expected at least 1.")
    ids = samples_of(dual, study)
    drawn = Subsets(ids, subsets, repeats, seed, fraction)
    return Evaluator(dual, study, Retrained(study, folder, workers), drawn, chosen(views, study))


def evaluate(
    run: str | os.PathLike[str] | Dual,
    study: Study,
    *,
    out: str | os.PathLike[str] | None = None,
    subsets: int = 50,
    repeats: int = 2,
    fraction: float = 0.5,
    views: Sequence[str] | None = None,
    workers: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """The linear datamodeling score of each view of a recording: how well it foretells training on parts of the data.

    Draws `subsets` random parts of the samples, trains on each of them `repeats` times (fresh seeds; at least 2 for the ceiling),
    and keeps the outcomes in `out`, default beside the recording: an interrupted evaluation goes on there. views: default all, and
    the peers that are installed if the study has `samples`. workers: processes, with one thread each.
    """
    asked = prepare(
        run,
        study,
        out=out,
        subsets=subsets,
        repeats=repeats,
        fraction=fraction,
        views=views,
        workers=workers,
        seed=seed,
    )
    return asked.run(progress)
