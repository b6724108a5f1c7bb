"""`dualform.open`: the door to every question."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

import polars as pl
import torch
from torch import Tensor, nn

from dualform.dual import certificate
from dualform.dual.compact import compact
from dualform.dual.gradients import compute_dtype
from dualform.dual.layer import DualLayer
from dualform.dual.masked import is_marked, is_replayed, plan
from dualform.dual.parallel import rebuild_each
from dualform.dual.weights import Reached, rebuilt
from dualform.errors import (
    InexactWarning,
    ModelMismatchError,
    NotRecordedError,
    QuestionError,
    UnknownLayerError,
)
from dualform.layers.streams import Layer
from dualform.progress import Progress
from dualform.query.answers import Answer, check
from dualform.query.attention import LayerAttention
from dualform.query.compact import Compact, compacted_weights
from dualform.query.contributions import LayerContributions
from dualform.query.estimate import Settings, estimate
from dualform.query.forward import Captured, run
from dualform.query.influence import Influence
from dualform.query.masking import Masking
from dualform.query.mislabelled import mislabelled
from dualform.query.slots import addresses
from dualform.store.format import Mark
from dualform.store.reader import Store

A = TypeVar("A", bound=Answer)
Target = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None


def open(path: str | os.PathLike[str], model: nn.Module | None = None) -> Dual:
    """Open a recording. The model gives the architecture; weights come from the store; the model is not changed.

    Without a model: `info`, `verify`, `layer`, and attention for query vectors.
    """
    store = Store(Path(path))
    return Dual(store, None if model is None else _matching(store, model), store.end_step)


class ByLayer(Mapping[str, A], Generic[A]):
    """Answers by the name of their layer."""

    def __init__(self, store: Store, answers: dict[str, A]):
        self._store, self._answers = store, answers

    def __getitem__(self, layer: str) -> A:
        if layer not in self._answers:
            self._store.layer(layer)
            raise UnknownLayerError(f"layer {layer!r} was not called for these inputs.")
        return self._answers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def __repr__(self) -> str:
        return "\n".join(repr(answer) for answer in self._answers.values())


COUNTERS = ("step", "mu_product")
"""Numbers among the tensors of an optimizer's state."""


class Dual:
    """A trained network in its dual form, at the end of its recording or at an earlier moment.

    Threads may share it and its answers. They wait for each other only while the model runs on their inputs.
    """

    def __init__(self, store: Store, model: nn.Module | None, end: int):
        self.store, self._model, self.end_step = store, model, end

    def __repr__(self) -> str:
        nothing = not self.store.end_step and self.store.manifest.ended is None
        why = " (nothing is sealed yet: is its recorder still open?)" if nothing else ""
        return f"Dual({str(self.store.folder)!r}, after {self.end_step} steps{why}, layers {self.layers})"

    @property
    def layers(self) -> list[str]:
        """The names of the recorded layers."""
        manifest = self.store.manifest
        return [layer.name for layer in manifest.layers if layer.name not in manifest.left_out]

    @property
    def rows(self) -> pl.DataFrame:
        """The row table: `step` and the columns given to batch()."""
        return self.store.rows.filter(pl.col("step") < self.end_step)

    @property
    def log(self) -> pl.DataFrame:
        """What log() was given, one line for each step."""
        return self.store.log.filter(pl.col("step") < self.end_step)

    def slots(self, layer: str) -> pl.DataFrame:
        """Where each slot of a layer comes from, in the order of slot numbers: its row in `rows`, its step and position, and whether
        it is `silent`: it wrote nothing, because its error signal is zero (padding, ignored labels)."""
        self.store.layer(layer)
        return addresses(self.store, layer, self.end_step)

    def info(self) -> dict[str, Any]:
        """What the store holds, as plain data."""
        manifest = self.store.manifest
        return {
            "path": str(self.store.folder),
            "created_by": manifest.created_by,
            "ended": manifest.ended or "not yet, or killed: what is sealed is here",
            "steps": self.store.end_step,
            "rows": manifest.totals.rows
            if manifest.keep == "totals" and manifest.totals
            else sum(chunk.rows for chunk in manifest.chunks),
            "keep": manifest.keep,
            "dtype": manifest.dtype,
            "bytes": self.store.nbytes,
            "snapshot_bytes": sum(snapshot.file.size for snapshot in manifest.snapshots),
            "chunks": len(manifest.chunks),
            "snapshots": self.store.snapshot_steps(),
            "totals": [
                {
                    "by": list(g.columns),
                    "kind": g.kind,
                    "groups": self.store.groups(n).height,
                    "step": manifest.totals.step if manifest.totals else 0,
                }
                for n, g in enumerate(manifest.totals.groupings if manifest.totals else ())
            ],
            "columns": {c.name: f"{c.type} per {c.per}" for c in manifest.columns},
            "layers": [
                {
                    "name": layer.name,
                    "kind": layer.kind,
                    "d_in": layer.d_in,
                    "d_out": layer.d_out,
                    "parameters": layer.parameters,
                    "slots": self.store.slots(layer.name),
                }
                for layer in manifest.layers
            ],
            "left_out": manifest.left_out,
            "row_evidence": {layer: str(evidence) for layer, evidence in manifest.rows.items()},
            "inexact": {name: {"step": m.step, "why": m.why} for name, m in self._marks().items()},
            "not_finite_from": {
                parameter.name: step
                for number, parameter in enumerate(manifest.parameters)
                if (step := certificate.not_finite_from(self.store, number, self.end_step)) is not None
            },
        }

    def verify(self, *, workers: int = 1, progress: Progress | None = None) -> certificate.Certificate:
        """Compare every recorded parameter with its dual: gap, rounding floor, movement, verdict.

        workers: threads, as for masked().
        """
        return certificate.verify(self.store, self.end_step, progress, workers)

    def layer(self, name: str) -> DualLayer:
        """One layer on the level of the paper: initial weight, keys, values, attention weights, equation 13."""
        self._warn()
        return DualLayer(self.store, name, self.end_step)

    def attend(self, inputs: Any, *, rows: int | None = None, silent: bool = False) -> ByLayer[LayerAttention]:
        """The attention of every layer for test inputs: a tensor, a tuple of arguments, or a dictionary of them.

        Without a model: a dictionary of query vectors by layer name, (queries, d_in) or (queries, positions, d_in).
        rows: how many examples there are, if that is not the length of the first tensor. silent: whether slots that wrote nothing
        take part; their error signal is zero, as that of padding and of ignored labels.
        """
        self._warn()
        if self._model is None:
            queries = self._vectors(inputs)
        else:
            layers = [layer for layer in self._recorded() if layer.attends]
            captured = run(self._ready, layers, inputs, rows, self.store.manifest.batch_axis)
            queries = {name: one.queries for name, one in captured.layers.items()}
        return ByLayer(self.store, {name: self._attention(name, some, silent) for name, some in queries.items()})

    def contributions(
        self,
        inputs: Any,
        *,
        target: Target = None,
        rows: int | None = None,
        silent: bool = False,
        progress: Progress | None = None,
    ) -> ByLayer[LayerContributions]:
        """The contribution of every slot to a target, signed; exact in the layer whose output the target is.

        target: an output unit, one for each example, or a function of the model's output that gives one number for
        each example; default: the unit with the largest output. silent: as for attend(); what such slots contribute is zero.
        progress: called while optimizers with matrices as coefficients are replayed.
        """
        if self._model is None:
            raise QuestionError("contributions() needs the model: dualform.open(path, model).")
        self._needs_slots("contributions")
        self._warn()
        captured = run(self._ready, self._recorded(), inputs, rows, self.store.manifest.batch_axis, target, True)
        answers = {
            name: self._contribution(name, one, captured.target, silent, progress)
            for name, one in captured.layers.items()
        }
        return ByLayer(self.store, answers)

    def influence(
        self,
        inputs: Any,
        *,
        target: Target = None,
        method: str = "whitened",
        layers: str | Collection[str] | None = None,
        segments: int | Sequence[tuple[int, int]] = 15,
        sample: str | None = None,
        damping: float | None = None,
        size: int = 32,
        memory: int = 1 << 30,
        rows: int | None = None,
        silent: bool = False,
        loss_mean: str = "tokens",
        progress: Progress | None = None,
    ) -> Influence:
        """What would change in a target without some of the training data: an estimate, positive for what supports it.

        target: a class, one for each example, or None, the model's answer: its margin, log(p / (1 − p)); or a function of the
        output that gives one number for each example. method: "whitened" (gradients with curvature between them; any loss),
        "kernel" (the best; softmax cross-entropy, thousands of rows in a segment; memory: bytes for its N² numbers), "sketch" (the
        kernel through size × size random numbers for each layer). segments: at most so many epochs, spread over the run, or
        (begin, end) in steps; sample: the column by which epochs are counted, `sample_id` unless told. damping: relative to the
        mean curvature, 0.3 for "whitened", 1 for the others. silent: as for attend(); a row is silent if it wrote nothing in any layer.
        loss_mean: what the loss was a mean over, which is undone: "tokens", the positions that have a loss (of a classifier, its rows);
        "rows" of the batch; or "none", for a sum.
        """
        if self._model is None:
            raise QuestionError("influence() needs the model: dualform.open(path, model).")
        self._needs_slots("influence")
        if self.store.manifest.keep == "totals":
            raise NotRecordedError(
                f'influence() needs slots, but {self.store.folder} keeps totals only. Record with keep="slots".'
            )
        self._warn()
        chosen, reached = self._chosen(layers), Reached()
        warned: set[str] = set()
        return estimate(
            self.store,
            [layer for layer in self._recorded() if layer.name in chosen],
            self.end_step,
            lambda step: self._with(self._weights_at(step, reached=reached, warned=warned)),
            inputs,
            rows,
            target,
            Settings(method, segments, sample, damping, size, memory, silent, loss_mean),
            progress,
        )

    def masked(
        self,
        *,
        keep: pl.Expr | str | None = None,
        drop: pl.Expr | str | None = None,
        layers: str | Collection[str] | None = None,
        read: str = "fewest",
        workers: int = 1,
        progress: Progress | None = None,
    ) -> nn.Module:
        """A plain copy of the model whose layers remember only some of their slots.

        This edits memory: coefficients, clipping and decay stay as they were. It does not predict retraining.
        read: "fewest": between two snapshots whichever are fewer, the slots kept or those left out, whose part is then taken from the
        weights as they were trained (SGD family; `mask_reads` counts them). "kept": every slot that is kept, on top of the initial
        part alone. They differ by no more than the gap that `verify` prints; only the second says anything about that gap.
        workers: how many threads rebuild parameters, one parameter each at a time. Each needs memory for a few matrices like it.
        """
        if read not in ("fewest", "kept"):
            raise QuestionError(f'read={read!r}: expected "fewest" or "kept".')
        question = self._masking(keep, drop, "masked")
        self._warn()
        names, found = self._parameters(layers), question.from_groups()
        if found is not None:
            weights, (view, kept) = self._weights_at(self.end_step), found
            sure = {
                name: weights[name]
                for name in names
                if read == "fewest" and not is_marked(self.store, name, self.end_step)
            }
            return self._with(weights | {name: view.rebuilt(name, kept, sure.get(name)) for name in names})
        takes_part = question.slots()
        anew = [name for name in names if read == "kept" or is_replayed(self.store, name)]
        weights = self._weights_at(self.end_step, but=anew)
        for name in names:
            self._whole(name, "masked()")
        trained = {name: weights[name] for name in names if name not in anew}
        values = rebuild_each(self.store, names, end=self.end_step, keep=takes_part, trained=trained, workers=workers)
        for name, value in zip(_counted("masking", names, progress), values, strict=True):
            weights[name] = value
        return self._with(weights)

    def mask_reads(
        self,
        *,
        keep: pl.Expr | str | None = None,
        drop: pl.Expr | str | None = None,
        layers: str | Collection[str] | None = None,
    ) -> dict[str, int]:
        """How many slots masked() would read for each parameter: its cost is this times the parameter's size.

        None where group deltas answer; between two snapshots the fewer of those kept and those left out; all, where an optimizer is
        replayed (Adam family).
        """
        question, names = self._masking(keep, drop, "mask_reads"), self._parameters(layers)
        if question.from_groups() is not None:
            return dict.fromkeys(names, 0)
        takes_part, end = question.slots(), self.end_step
        plans = {name: plan(self.store, name, end=end, keep=takes_part) for name in names}
        every = {name: sum(map(self.store.slots, (one.name for one in self.store.users(name)))) for name in names}
        return {name: every[name] if found is None else found.slots for name, found in plans.items()}

    def mislabelled(
        self,
        k: int | None = 100,
        *,
        by: str | Sequence[str] = "sample_id",
        layer: str | None = None,
        where: pl.Expr | str | None = None,
        reduction: str = "mean",
    ) -> pl.DataFrame:
        """The k training samples (None: all) that look most mislabelled, by the mean size of their error signals at the output.

        `score` is that mean over all visits, which are positions that had a loss, with a loss that takes a mean over such positions
        undone (reduction="sum": it took none). Evidence: `visits`; the columns that are one for all visits, such as a label; and, if the error signals are those of
        softmax cross-entropy, the output `unit` that it was trained as with its mean `probability`, what the model `said`
        instead (the likeliest other unit), and at how many visits its answer was `wrong`. layer: default the last one. A column of
        the recording that is called like one of these has `_recorded` behind its name.
        """
        if k is not None:
            check(k, absolute=False, lowest=False)
        if reduction not in ("mean", "sum"):
            raise QuestionError(f'reduction={reduction!r}: expected "mean" or "sum", as the loss has it.')
        if self.store.manifest.keep != "slots":
            raise NotRecordedError(
                f"mislabelled() needs the error signals of single slots, but {self.store.folder} keeps "
                f'{self.store.manifest.keep} only. Record with keep="slots".'
            )
        attending = [one.name for one in self._recorded() if one.attends and one.name in self.layers]
        name = layer if layer is not None or not attending else attending[-1]
        _, chosen = self.store.layer(name or "")
        if not chosen.attends or chosen.outputs:
            what = (
                "has no single error signals"
                if not chosen.attends
                else "kept those of some output units only (outputs=)"
            )
            raise NotRecordedError(f"mislabelled() needs all error signals of layer {name!r}, which {what}.")
        self._warn()
        dtype = compute_dtype(self.store, chosen.parameters[0])
        mean = reduction == "mean"
        return mislabelled(self.store, chosen.name, self.end_step, dtype, k=k, by=by, where=where, mean=mean)

    def compact(self, rank: int, *, layers: str | Collection[str] | None = None) -> Compact:
        """What layers learned in `rank` slots each (default: all layers that attend), the best that so few can do.

        Remark 3.4 of the paper. `["4"]` has `keys`, `values`, `error` and the `slots` replaced; `.model()` is a plain copy of
        the model with the compacted weights.
        """
        self._needs_slots("compact")
        self._warn()
        attending = {layer.name for layer in self._recorded() if layer.attends}
        names = [name for name in self.layers if name in attending] if layers is None else self._chosen(layers)
        found = {name: compact(DualLayer(self.store, name, self.end_step), rank) for name in names}

        def model() -> nn.Module:
            weights = self._weights_at(self.end_step)
            for name, layer in found.items():
                weights |= compacted_weights(self.store.layer(name)[1], layer, weights)
            return self._with(weights)

        return Compact(found, model)

    def explore(self, train: Any = None, test: Any = None, **options: Any) -> Any:
        """Show this run in the browser: where predictions come from, and what happens without some memory.

        train: what the column `by` numbers, an array or dataset of inputs or (input, label) pairs; with by=("task", "sample_id"),
        a dictionary of such. test: inputs with labels, (inputs, labels) or a dataset, or a dictionary of such.
        Options: class_names=[…]; show=function of an input that gives an array, a text or a vector ("image" | "vector" | "text");
        by="sample_id"; label="label"; draw=function from ink (32, 32) to an input; title=; host="127.0.0.1"; port=0; browser=True;
        block=: whether to wait (default: not in a notebook). Gives the server, with `url`, which has the token that every
        visitor needs, and `close()`.
        """
        # The one door to a room further right: it is opened when somebody asks for it
        return import_module("dualform.explorer").explore(self, train, test, **options)

    def reopened(self) -> Dual:
        """The same, read from the disk anew: totals may have been built since."""
        return Dual(Store(self.store.folder), self._model, self.end_step)

    def until(self, step: int) -> Dual:
        """The dual as it was after `step` updates."""
        return Dual(self.store, self._model, self._moment(step))

    def at_step(self, step: int, *, progress: Progress | None = None) -> nn.Module:
        """A plain copy of the model as it was after `step` updates."""
        return self._with(self._weights_at(self._moment(step), progress))

    def primal(self) -> nn.Module:
        """A plain copy of the trained model at this moment, in evaluation mode."""
        return self._with(self._weights_at(self.end_step)).eval()

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The state that the optimizer had for each recorded parameter: `["0.weight"]["momentum_buffer"]`.

        Only where a snapshot was taken: `info()["snapshots"]`.
        """
        snapshot = self.store.snapshot(self.end_step)
        states: dict[str, dict[str, Tensor]] = {}
        for name in snapshot:
            kind, _, rest = name.partition(".")
            if kind == "state":
                parameter, _, state = rest.rpartition(".")
                value = snapshot[name].clone()
                if state in COUNTERS:
                    value = value.float().reshape(())  # as PyTorch's optimizers have them
                states.setdefault(parameter, {})[state] = value
        return states

    # Inside

    @cached_property
    def _ready(self) -> nn.Module:
        """The model for queries; nobody else sees it."""
        return self.primal()

    def _marks(self) -> dict[str, Mark]:
        marks = self.store.manifest.inexact
        return {name: mark for name, mark in marks.items() if mark.step < self.end_step}

    def _warn(self) -> None:
        """Say in every answer which layers are inexact."""
        for name, mark in self._marks().items():
            warnings.warn(
                f"layer {name!r} is inexact from step {mark.step} on: {mark.why}",
                InexactWarning,
                stacklevel=3,
            )

    def _moment(self, step: int) -> int:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= self.end_step:
            raise QuestionError(f"step {step!r}: expected a whole number from 0 to {self.end_step}.")
        return step

    def _needs_slots(self, question: str) -> None:
        if self.store.manifest.keep == "keys":
            raise NotRecordedError(
                f'{question}() needs error signals, but {self.store.folder} keeps keys only. Record with keep="slots".'
            )

    def _masking(self, keep: pl.Expr | str | None, drop: pl.Expr | str | None, question: str) -> Masking:
        if keep is not None and drop is None:
            condition, name = keep, "keep"
        elif drop is not None and keep is None:
            condition, name = drop, "drop"
        else:
            raise QuestionError(f'{question}() needs one of keep= and drop=, e.g. drop=pl.col("task") == "fashion".')
        self._needs_slots(question)
        return Masking(self.store, condition, self.end_step, name)

    def _chosen(self, layers: str | Collection[str] | None) -> list[str]:
        if layers is None:
            return self.layers
        found = []
        for pattern in [layers] if isinstance(layers, str) else layers:
            names = [name for name in self.layers if fnmatchcase(name, pattern)]
            if not names:
                self.store.layer(pattern)
            found += names
        return found

    def _recorded(self) -> list[Layer]:
        return list(self.store.manifest.layers)

    def _parameters(self, layers: str | Collection[str] | None) -> list[str]:
        """The parameters of some layers (default: all), each once."""
        names = self._chosen(layers)
        return list(dict.fromkeys(p for y in self.store.manifest.layers if y.name in names for p in y.parameters))

    def _whole(self, parameter: str, question: str) -> None:
        if any(layer.outputs for layer in self.store.users(parameter)):
            raise NotRecordedError(
                f"{question} needs all error signals of {parameter!r}, but only those of some output units were kept (outputs=). "
                f"Leave its layer out with layers=, or ask for a step that has a snapshot: {self.store.snapshot_steps()}."
            )

    def _vectors(self, inputs: Any) -> dict[str, Tensor]:
        if not isinstance(inputs, Mapping):
            raise QuestionError(
                "this recording was opened without a model, so attend() takes query vectors by layer name, e.g. "
                '{"4": vectors}; or open it with the model: dualform.open(path, model).'
            )
        found = {}
        for name, given in inputs.items():
            _, layer = self.store.layer(name)
            vectors = torch.as_tensor(given)
            if vectors.dim() not in (2, 3) or vectors.shape[-1] != layer.d_in:
                raise QuestionError(
                    f"queries for layer {name!r} have shape {tuple(vectors.shape)}; expected (queries, {layer.d_in}) or "
                    f"(queries, positions, {layer.d_in})."
                )
            found[name] = vectors if vectors.dim() == 3 else vectors.unsqueeze(1)
        return found

    def _attention(self, name: str, queries: Tensor, silent: bool) -> LayerAttention:
        _, layer = self.store.layer(name)
        if not layer.attends:
            raise QuestionError(
                f"layer {name!r} is elementwise: it has no keys, hence no attention. Ask contributions()."
            )
        dtype = compute_dtype(self.store, layer.parameters[0])
        return LayerAttention(self.store, layer, self.end_step, queries, dtype, silent=silent)

    def _contribution(
        self, name: str, captured: Captured, target: Tensor, silent: bool, progress: Progress | None
    ) -> LayerContributions:
        _, layer = self.store.layer(name)
        dtype = compute_dtype(self.store, layer.parameters[0])
        assert captured.gradients is not None
        return LayerContributions(
            self.store, layer, self.end_step, captured.queries, captured.gradients, target, dtype, silent=silent, progress=progress
        )  # fmt: skip

    def _weights_at(
        self,
        step: int,
        progress: Progress | None = None,
        reached: Reached | None = None,
        but: Collection[str] = (),
        warned: set[str] | None = None,
    ) -> dict[str, Tensor]:
        """All parameters and buffers: recorded ones exactly, the others from the nearest earlier snapshot.

        reached: for several moments, one after the other. but: these are not asked for. warned: parameters and buffers whose warning was
        given already; those of this one are added.
        """
        nearest = max(s for s in self.store.snapshot_steps() if s <= step)
        snapshot = self.store.snapshot(nearest)
        weights = {name.removeprefix("model."): snapshot[name] for name in snapshot if name.startswith("model.")}
        if nearest == step:
            return weights
        if self.store.manifest.keep != "slots":
            raise NotRecordedError(
                f"{self.store.folder} keeps {self.store.manifest.keep} only: the network is known after "
                f'{self.store.snapshot_steps()} steps, not after {step}. Record with keep="slots" to have every step.'
            )
        recorded = {p.name for p in self.store.manifest.parameters}
        others = set(weights) - recorded - self._aliases() - (warned or set())
        if warned is not None:
            warned |= others
        if others:
            warnings.warn(
                f"not recorded, so taken from the snapshot at step {nearest} instead of step {step}: "
                f"{', '.join(sorted(others))}",
                stacklevel=4,
            )
        asked = [parameter.name for parameter in self.store.manifest.parameters if parameter.name not in but]
        for name in _counted("rebuilding", asked, progress):
            self._whole(name, f"the network after step {step}")
            weights[name] = rebuilt(self.store, name, begin=nearest, end=step, reached=reached)
        return weights

    def _aliases(self) -> set[str]:
        """Other names of parameters that several modules share."""
        if self._model is None:
            return set()
        first = {name for name, _ in self._model.named_parameters()}
        return {name for name, _ in self._model.named_parameters(remove_duplicate=False)} - first

    def _with(self, weights: dict[str, Tensor]) -> nn.Module:
        if self._model is None:
            raise QuestionError("this needs the model: dualform.open(path, model).")
        model = copy.deepcopy(self._model)
        with torch.no_grad():
            aliases = self._aliases()
            for name, value in model.state_dict(keep_vars=True).items():
                known = name in weights and name not in aliases
                if known and isinstance(value, Tensor) and not nn.parameter.is_lazy(value):
                    value.data.copy_(weights[name])
        return model


def _counted(what: str, names: list[str], progress: Progress | None) -> Iterator[str]:
    """Tell how far we are."""
    for done, name in enumerate(names):
        if progress is not None:
            progress(what, done, len(names))
        yield name
    if progress is not None:
        progress(what, len(names), len(names))


def _matching(store: Store, model: nn.Module) -> nn.Module:
    """The model, if it has the parameters that were recorded."""
    shapes = {n: tuple(value.shape) for n, value in model.named_parameters() if not nn.parameter.is_lazy(value)}
    for parameter in store.manifest.parameters:
        if parameter.name not in shapes:
            raise ModelMismatchError(
                f"the recording has a parameter {parameter.name!r}, the model has none of that name. Open it with the "
                f"architecture that was recorded. The model has: {', '.join(list(shapes)[:8])}"
                f"{', …' if len(shapes) > 8 else ''}."
            )
        if shapes[parameter.name] != parameter.shape:
            raise ModelMismatchError(
                f"{parameter.name!r} has shape {parameter.shape} in the recording and {shapes[parameter.name]} in the "
                f"model. Open it with the architecture that was recorded."
            )
    return model
