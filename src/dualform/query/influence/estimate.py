"""From a question to influence: segments, the queries at each segment's weights, and a method's scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dualform.curvature.loss_mean import LOSS_MEANS, RECORDED_MEAN, LossMean
from dualform.dual.gradients import compute_dtype
from dualform.errors import QuestionError
from dualform.layers.layer import Layer
from dualform.layers.projected import project_queries
from dualform.progress import Progress, report
from dualform.query.executors import HERE, Runner
from dualform.query.forward import Captured, output_of, run
from dualform.query.influence.answers import Influence, RowInfluenceScorer
from dualform.query.influence.kernel import kernel_scores
from dualform.query.influence.problem import Problem
from dualform.query.influence.products import Question, map_queries
from dualform.query.influence.scores import Scores
from dualform.query.influence.segments import Segment, segments
from dualform.query.influence.sketch import sketched_scores
from dualform.query.influence.whitened import whitened_scores
from dualform.query.targets import Target, TargetReader
from dualform.store.collection import collection_of, spans_of
from dualform.store.reader import Store

Method = Callable[[Problem], Scores]
METHODS: dict[str, Method] = {
    "whitened": whitened_scores,
    "kernel": kernel_scores,
    "sketch": sketched_scores,
}
ModelAt = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Settings:
    """How influence is estimated; `Dual.influence` says what each means."""

    method: str
    segments: int | Sequence[tuple[int, int]]
    sample: str | None
    damping: float | None
    size: int
    memory: int
    silent: bool = False
    loss_mean: str = "tokens"

    def __post_init__(self) -> None:
        _check_name("loss_mean", self.loss_mean, LOSS_MEANS)
        _check_name("method", self.method, list(METHODS))
        if self.damping is not None and not self.damping > 0:
            raise QuestionError(f"damping={self.damping!r}: expected a number above 0, relative to the mean curvature.")
        if self.size < 1:
            raise QuestionError(f"size={self.size!r}: expected at least 1.")


def _check_name(setting: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise QuestionError(f"{setting}={name!r}: expected one of {', '.join(map(repr, known))}.")


def estimate(
    store: Store,
    layers: Sequence[Layer],
    end: int,
    model_at: ModelAt,
    reader: TargetReader,
    target: Target,
    settings: Settings,
    progress: Progress | None = None,
    executor: Runner = HERE,
) -> Influence:
    """Return the influence of a run's rows, up to step `end`, on a target for test inputs."""
    if not layers:
        raise QuestionError("influence() of no layers: name some with layers=, or leave it out for all.")
    found = segments(store, end, settings.segments, settings.sample)
    dtype = compute_dtype(store, layers[0].parameters[0])

    def trained_output() -> Any:
        with torch.no_grad():
            return output_of(model_at(end).eval(), reader.inputs)

    aim = reader.margin(target, trained_output)
    collection = collection_of(store)
    questions = []
    for segment in report("queries", found, progress):
        model = model_at(segment.moment).eval()
        captured = run(
            model, [layer.in_network for layer in layers], reader.inputs, reader.rows, store.manifest.batch_axis, aim
        )
        weight = 1.0 if collection is None else collection.weight(_checkpoint(store, segment))
        questions.append(_question(store, captured.layers, dtype, weight))
    called = [layer for layer in layers if all(layer.name in question for question in questions)]
    if not called:
        raise QuestionError("none of these layers was called for these inputs.")
    problem = Problem(
        store=store,
        layers=called,
        segments=found,
        questions=questions,
        dtype=dtype,
        loss_mean=loss_mean_of(store, settings.loss_mean),
        damping=settings.damping,
        size=settings.size,
        memory=settings.memory,
        progress=progress,
    )
    scores = METHODS[settings.method](problem)
    scorer = RowInfluenceScorer(store, called, end, problem.examples, scores, dtype)
    return Influence(scorer, silent=settings.silent, executor=executor.reporting(progress))


def _checkpoint(store: Store, segment: Segment) -> int:
    """Return the checkpoint that a segment of a collection ends with: the queries are taken from its weights."""
    return next(span.checkpoint for span in spans_of(store, store.end_step) if segment.end <= span.end)


def _question(store: Store, captured: Mapping[str, Captured], dtype: torch.dtype, weight: float) -> Question:
    """Return what is asked of each layer that the target depends on. weight: scores, which are linear in a query's gradient, are multiplied by it."""
    question = {}
    for name, found in captured.items():
        if found.gradients is None:
            continue
        _, layer = store.layer(name)
        queries = found.queries.to("cpu", dtype)
        slopes = found.gradients.to("cpu", dtype)
        queries, slopes = project_queries(layer, queries, slopes)
        if weight != 1.0:
            slopes = slopes * weight
        question[name] = map_queries(layer, queries, slopes)
    return question


def told_loss_mean(store: Store) -> str:
    """Return what the loss was a mean over, as far as the store knows."""
    collection = collection_of(store)
    return RECORDED_MEAN if collection is None else collection.loss_mean


def loss_mean_of(store: Store, mean: str) -> LossMean:
    """Return by what error signals were divided, found once for an open store."""
    return store.cached(("loss mean", mean), lambda: LossMean(store, mean))
