"""From a question to influence: segments, curvature, the queries at each segment's weights, and a method's scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dualform.curvature.loss_mean import LOSS_MEANS, LossMean
from dualform.curvature.sums import DAMPING, Curvature
from dualform.dual.gradients import compute_dtype
from dualform.errors import QuestionError
from dualform.layers.streams import Layer
from dualform.progress import Progress, report
from dualform.query.forward import Captured, output_of, run
from dualform.query.influence import kernel, sketch
from dualform.query.influence.answers import Influence, RowInfluenceScorer
from dualform.query.influence.factors import factors
from dualform.query.influence.products import MapQuery, map_queries, whitened_products
from dualform.query.influence.scores import LinearScores, OfSlots, RowScores, Scored
from dualform.query.influence.segments import Segment, segments
from dualform.query.influence.softmax import Misfit, logits
from dualform.query.targets import Target, TargetReader
from dualform.store.reader import Store

METHODS = ("whitened", "kernel", "sketch")
ModelAt = Callable[[int], nn.Module]
Question = dict[str, list[MapQuery]]


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
        if self.loss_mean not in LOSS_MEANS:
            raise QuestionError(f"loss_mean={self.loss_mean!r}: expected one of {', '.join(map(repr, LOSS_MEANS))}.")
        if self.method not in METHODS:
            raise QuestionError(f"method={self.method!r}: expected one of {', '.join(map(repr, METHODS))}.")
        if self.damping is not None and not self.damping > 0:
            raise QuestionError(f"damping={self.damping!r}: expected a number above 0, relative to the mean curvature.")
        if self.size < 1:
            raise QuestionError(f"size={self.size!r}: expected at least 1.")


def estimate(
    store: Store,
    layers: Sequence[Layer],
    end: int,
    model_at: ModelAt,
    reader: TargetReader,
    target: Target,
    settings: Settings,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Influence:
    """The influence of a run's rows, up to step `end`, on a target for test inputs."""
    if not layers:
        raise QuestionError("influence() of no layers: name some with layers=, or leave it out for all.")
    found = segments(store, end, settings.segments, settings.sample)
    dtype = compute_dtype(store, layers[0].parameters[0])

    def trained() -> Any:
        with torch.no_grad():
            return output_of(model_at(end).eval(), reader.inputs)

    aim = reader.margin(target, trained)
    questions: list[Question] = []
    for segment in report("queries", found, progress):
        model = model_at(segment.moment).eval()
        captured = run(model, layers, reader.inputs, reader.rows, store.manifest.batch_axis, aim).layers
        questions.append(_question(store, captured, dtype))
    called = [layer for layer in layers if all(layer.name in question for question in questions)]
    if not called:
        raise QuestionError("none of these layers was called for these inputs.")
    examples = next(iter(questions[0].values()))[0].slopes.shape[0]
    scored = _scored(store, called, found, questions, settings, progress)
    scorer = RowInfluenceScorer(store, called, end, examples, scored, dtype)
    return Influence(scorer, silent=settings.silent, executor=executor)


def _question(store: Store, captured: Mapping[str, Captured], dtype: torch.dtype) -> Question:
    """Return the queries and slopes of each linear map, by layer."""
    question = {}
    for name, found in captured.items():
        if found.gradients is not None:
            _, layer = store.layer(name)
            question[name] = map_queries(layer, found.queries.to("cpu", dtype), found.gradients.to("cpu", dtype))
    return question


def _scored(
    store: Store,
    layers: Sequence[Layer],
    found: Sequence[Segment],
    questions: Sequence[Question],
    settings: Settings,
    progress: Progress | None,
) -> Scored:
    """Score rows by the method that was asked for."""
    loss_mean = loss_mean_of(store, settings.loss_mean)
    if settings.method == "whitened":
        return _whitened(store, layers, found, questions, loss_mean, settings, progress)
    recorded = [layer for layer in store.manifest.layers if layer.name not in store.manifest.left_out]
    output = logits(recorded)
    row_scores = []
    slot_scores = []
    for segment, question in report(settings.method, list(zip(found, questions, strict=True)), progress):
        misfit = Misfit(store, segment, output, loss_mean)
        common = (store, layers, segment, question, misfit, loss_mean)
        if settings.method == "kernel":
            damping = settings.damping or kernel.DAMPING
            row_scores.append(kernel.kernel_scores(*common, damping, settings.memory))
        else:
            damping = settings.damping or sketch.DAMPING
            slot_scores.append(sketch.sketched(*common, settings.size, damping))
    if settings.method == "kernel":
        return RowScores([layer.name for layer in layers], found, row_scores)
    return LinearScores(store, found, loss_mean, slot_scores)


def loss_mean_of(store: Store, mean: str) -> LossMean:
    """By what error signals were divided, found once for an open store."""
    return store.cached(("loss mean", mean), lambda: LossMean(store, mean))


def _whitened(
    store: Store,
    layers: Sequence[Layer],
    found: Sequence[Segment],
    questions: Sequence[Question],
    loss_mean: LossMean,
    settings: Settings,
    progress: Progress | None,
) -> LinearScores:
    curvatures = factors(store, layers, found, loss_mean, progress)
    damping = settings.damping or DAMPING
    products = []
    for question, by_layer in zip(questions, curvatures, strict=True):
        products.append({name: _whitened_maps(question[name], by_layer[name], damping) for name in by_layer})
    norms = [{name: known.norms for name, known in by_layer.items()} for by_layer in curvatures]
    return LinearScores(store, found, loss_mean, products, norms)


def _whitened_maps(queries: Sequence[MapQuery], curvature: Curvature, damping: float) -> list[OfSlots]:
    pairs = zip(queries, curvature.maps, strict=True)
    return [whitened_products(query, factors, damping) for query, factors in pairs]
