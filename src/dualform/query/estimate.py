"""From a question to influence: segments, curvature, the queries at each segment's weights, and a method's scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from torch import nn

from dualform.dual.gradients import compute_dtype
from dualform.errors import QuestionError
from dualform.influence import kernel, sketch, whitened
from dualform.influence.asked import Asked, asked
from dualform.influence.curvature import DAMPING, Curvature
from dualform.influence.factors import factors
from dualform.influence.loss_mean import LOSS_MEANS, LossMean
from dualform.influence.scored import LinearScores, OfSlots, RowScores, Scored
from dualform.influence.segments import Segment, segments
from dualform.influence.softmax import Misfit, logits
from dualform.layers.streams import Layer
from dualform.progress import Progress
from dualform.query.cache import cached
from dualform.query.forward import margin, run
from dualform.query.influence import Influence, RowInfluenceScorer
from dualform.store.reader import Store

METHODS = ("whitened", "kernel", "sketch")
ModelAt = Callable[[int], nn.Module]
Question = dict[str, list[Asked]]


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
    inputs: Any,
    rows: int | None,
    target: Any,
    settings: Settings,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Influence:
    """The influence of a run's rows, up to step `end`, on a target for test inputs."""
    if not layers:
        raise QuestionError("influence() of no layers: name some with layers=, or leave it out for all.")
    found = segments(store, end, settings.segments, settings.sample)
    dtype = compute_dtype(store, layers[0].parameters[0])
    aim = margin(model_at(end).eval(), inputs, rows, target, store.manifest.batch_axis)
    questions: list[Question] = []
    for done, segment in enumerate(found):
        if progress is not None:
            progress("queries", done, len(found))
        model = model_at(segment.moment).eval()
        captured = run(model, layers, inputs, rows, store.manifest.batch_axis, aim, True).layers
        questions.append(
            {
                name: asked(store.layer(name)[1], one.queries.to("cpu", dtype), one.gradients.to("cpu", dtype))
                for name, one in captured.items()
                if one.gradients is not None
            }
        )
    if progress is not None:
        progress("queries", len(found), len(found))
    called = [layer for layer in layers if all(layer.name in question for question in questions)]
    if not called:
        raise QuestionError("none of these layers was called for these inputs.")
    examples = next(iter(questions[0].values()))[0].slopes.shape[0]
    scored = _scored(store, called, found, questions, settings, progress)
    scorer = RowInfluenceScorer(store, called, end, examples, scored, dtype)
    return Influence(scorer, silent=settings.silent, executor=executor)


def _scored(
    store: Store,
    layers: Sequence[Layer],
    found: Sequence[Segment],
    questions: Sequence[Question],
    settings: Settings,
    progress: Progress | None,
) -> Scored:
    loss_mean = loss_mean_of(store, settings.loss_mean)
    if settings.method == "whitened":
        damping = settings.damping or DAMPING
        known = factors(store, layers, found, loss_mean, progress)
        products = [_whitened(q, f, damping) for q, f in zip(questions, known, strict=True)]
        norms = [{name: one.norms for name, one in f.items()} for f in known]
        return LinearScores(store, found, loss_mean, products, norms)
    last = logits([layer for layer in store.manifest.layers if layer.name not in store.manifest.left_out])
    shares, sketches = [], []
    for done, (segment, question) in enumerate(zip(found, questions, strict=True)):
        if progress is not None:
            progress(settings.method, done, len(found))
        common = store, layers, segment, question, Misfit(store, segment, last, loss_mean), loss_mean
        if settings.method == "kernel":
            damping = settings.damping or kernel.DAMPING
            shares.append(kernel.kernel_scores(*common, damping, settings.memory))
        else:
            damping = settings.damping or sketch.DAMPING
            sketches.append(sketch.sketched(*common, settings.size, damping))
    if progress is not None:
        progress(settings.method, len(found), len(found))
    if settings.method == "kernel":
        return RowScores([layer.name for layer in layers], found, shares)
    return LinearScores(store, found, loss_mean, sketches)


def loss_mean_of(store: Store, mean: str) -> LossMean:
    """By what error signals were divided, found once for an open store."""
    return cached(store, ("loss mean", mean), lambda: LossMean(store, mean))


def _whitened(question: Question, known: dict[str, Curvature], damping: float) -> dict[str, list[OfSlots]]:
    return {
        name: [
            whitened.whitened(one.pairing, one.queries, one.slopes, factors, damping)
            for one, factors in zip(question[name], curvature.maps, strict=True)
        ]
        for name, curvature in known.items()
    }
