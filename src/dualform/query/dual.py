"""`dualform.open`: the door to every question."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

from dualform.checkpoints import StateDict, read_checkpoint
from dualform.dual.certificate import Certificate
from dualform.dual.compact import Compact, compact, compacted_weights
from dualform.dual.gradients import compute_dtype
from dualform.dual.layer import DualLayer
from dualform.dual.published import Published, compare
from dualform.dual.verify import verify
from dualform.dual.weights import Reached
from dualform.errors import InexactWarning, NotRecordedError, QuestionError
from dualform.forked import require_polars
from dualform.layers.layer import Layer
from dualform.progress import Progress
from dualform.query.attention import LayerAttention
from dualform.query.by_layer import ByLayer, Contributions
from dualform.query.completions import Prompt, encode_completion
from dualform.query.conditions import Where
from dualform.query.contribution_scorer import ContributionScorer
from dualform.query.contributions import LayerContributions
from dualform.query.executors import HERE, Runner, runner_of
from dualform.query.explained import ExplainedMovement, explain_movement
from dualform.query.forward import count_rows, run
from dualform.query.influence.answers import Influence
from dualform.query.influence.estimate import Settings, estimate, told_loss_mean
from dualform.query.influence.mislabelled import mislabelled
from dualform.query.info import checkpoint_table, marks, store_info
from dualform.query.masking import Mask, make_mask, mask_reads, masked_weights
from dualform.query.network import Network
from dualform.query.projected_contributions import ProjectedContributions, ProjectedScorer
from dualform.query.slots import addresses
from dualform.query.sources import Sources, Texts, rank_documents
from dualform.query.targets import Target, TargetReader, predicts_next_token
from dualform.store.collection import collection_of, refuse_collected
from dualform.store.files import Files, files_at
from dualform.store.reader import Store
from dualform.store.run import open_store
from dualform.store.unkept import require_gradients

COUNTERS = ("step", "mu_product")
"""Numbers among the tensors of an optimizer's state."""


def open(
    path: str | os.PathLike[str] | Files, model: nn.Module | None = None, *, executor: str | Executor | None = None
) -> Dual:
    """Open a recording. The model gives the architecture; weights come from the store; the model is not changed.

    path: a folder; an address, such as s3://bucket/run (docs/remote.md); or the files of a store elsewhere, read through the methods of
    `store.files.Files`.
    Without a model: `info`, `verify`, `layer`, and attention for query vectors. executor: where slots are scored: "threads", "processes",
    "ray" (the cluster at RAY_ADDRESS, else one on this machine), or any `concurrent.futures.Executor`; default: in the thread that asks.
    """
    files = path if isinstance(path, Files) else files_at(path)
    store = open_store(files)
    model = getattr(model, "_orig_mod", model)  # what torch.compile() wraps
    return Dual(store, model, store.end_step, runner_of(executor))


class Dual:
    """A trained network in its dual form, at the end of its recording or at an earlier step.

    Threads may share it and its answers. They wait for each other only while the model runs on their inputs.
    """

    def __init__(self, store: Store, model: nn.Module | None, end: int, executor: Runner = HERE):
        self._store = store
        self.end_step = end
        self._model = model
        self._network = Network(store, model)
        self._executor = executor

    def __repr__(self) -> str:
        collection = collection_of(self.store)
        origin = "" if collection is None else f"{collection}, "
        is_empty = not self.store.end_step and self.store.manifest.ended is None
        why = " (nothing is sealed yet: is its recorder still open?)" if is_empty else ""
        unit = "steps" if collection is None else "batches"
        return f"Dual({self.store.location!r}, {origin}after {self.end_step} {unit}{why}, layers {self.layers})"

    @property
    def store(self) -> Store:
        """The recording on disk. Its tables are those of Polars, which a forked process may not have."""
        require_polars()
        return self._store

    # What was recorded

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
    def checkpoints(self) -> pl.DataFrame:
        """The checkpoints of a collection, one line each, with the steps that are its batches; empty if a training was recorded."""
        return checkpoint_table(self.store, self.end_step)

    @property
    def samples(self) -> pl.DataFrame | None:
        """What is known of each sample, such as its text, one line for each `sample_id`; None if that was not kept."""
        return self.store.samples()

    @property
    def log(self) -> pl.DataFrame:
        """What log() was given, one line for each step."""
        return self.store.log.filter(pl.col("step") < self.end_step)

    def slots(self, layer: str) -> pl.DataFrame:
        """Return where each slot of a layer comes from, in the order of slot numbers: its row in `rows`, its step and position.

        A slot is `silent` if it wrote nothing, because its error signal is zero (padding, ignored labels).
        """
        self.store.layer(layer)
        return addresses(self.store, layer, self.end_step)

    def info(self) -> dict[str, Any]:
        """Return what the store holds, as plain data."""
        return store_info(self.store, self.end_step)

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state that the optimizer had for each recorded parameter: `["0.weight"]["momentum_buffer"]`.

        Only where a snapshot was taken: `info()["snapshots"]`.
        """
        self._needs_training("optimizer_state()")
        snapshot = self.store.snapshot(self.end_step)
        states: dict[str, dict[str, Tensor]] = {}
        for name in snapshot:
            kind, _, rest = name.partition(".")
            if kind != "state":
                continue
            parameter, _, state = rest.rpartition(".")
            value = snapshot[name].clone()
            if state in COUNTERS:
                value = value.float().reshape(())  # as PyTorch's optimizers have them
            states.setdefault(parameter, {})[state] = value
        return states

    def verify(
        self,
        *,
        checkpoint: StateDict | str | os.PathLike[str] | None = None,
        workers: int = 1,
        progress: Progress | None = None,
    ) -> Certificate:
        """Compare every recorded parameter with its dual: gap, rounding floor, movement, verdict.

        checkpoint: a state dict, or a file or folder with one: whether these weights are the published ones, `.published`. workers: threads, as
        for masked().
        """
        found = verify(self.store, self.end_step, progress, workers)
        if checkpoint is None:
            return found
        return replace(found, published=self._compared_with(checkpoint))

    def _compared_with(self, checkpoint: StateDict | str | os.PathLike[str]) -> Published:
        is_path = isinstance(checkpoint, (str, os.PathLike))
        published = read_checkpoint(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
        first = self._network.weights_at(0)
        last = self._network.weights_at(self.end_step)
        return compare(first, last, published, str(checkpoint) if is_path else "the checkpoint")

    def close(self) -> None:
        """End what `executor=` has started: threads, processes, Ray. An executor that was given stays as it is."""
        self._executor.backend.close()

    # Moments of training

    def at(self, step: int) -> Dual:
        """Return the dual as it was after `step` updates. `dual.at(step).model()` is the network of that moment."""
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= self.end_step:
            raise QuestionError(f"step {step!r}: expected a whole number from 0 to {self.end_step}.")
        return Dual(self.store, self._model, step, self._executor)

    def model(self, *, progress: Progress | None = None) -> nn.Module:
        """Return a plain copy of the model with its weights at this moment, in evaluation mode."""
        return self._network.module(self._network.weights_at(self.end_step, progress=progress))

    def reopened(self) -> Dual:
        """Return the same, read from the disk anew: totals may have been built since."""
        return Dual(open_store(self.store.files), self._model, self.end_step, self._executor)

    # Questions

    def layer(self, name: str) -> DualLayer:
        """Return one layer on the level of the paper: initial weight, keys, values, attention weights, equation 13."""
        self._warn()
        return DualLayer(self.store, name, self.end_step)

    def attend(self, inputs: Any, *, rows: int | None = None, silent: bool = False) -> ByLayer[LayerAttention]:
        """Return the attention of every layer for test inputs: a tensor, a tuple of arguments, or a dictionary of them.

        Without a model: a dictionary of query vectors by layer name, (queries, d_in) or (queries, positions, d_in).
        rows: how many examples there are, if that is not the length of the first tensor. silent: whether slots that wrote nothing
        take part; their error signal is zero, as that of padding and of ignored labels.
        """
        self._warn()
        if self._network.has_model:
            layers = [layer.in_network for layer in self.store.manifest.layers if layer.attends]
            captured = run(self._query_model, layers, inputs, rows, self.store.manifest.batch_axis)
            queries = {name: found.queries for name, found in captured.layers.items()}
        else:
            queries = self._query_vectors(inputs)
        missing = {name: self.store.why_no_positions(name) for name in queries if self.store.has_no_positions(name)}
        if missing and len(missing) == len(queries):
            raise NotRecordedError(next(iter(missing.values())))
        answers = {name: self._attention(name, given, silent) for name, given in queries.items() if name not in missing}
        return ByLayer(self.store, answers, missing)

    def contributions(
        self,
        inputs: Any,
        *,
        target: Target = None,
        tokenizer: Any = None,
        layers: str | Collection[str] | None = None,
        rows: int | None = None,
        silent: bool = False,
        progress: Progress | None = None,
    ) -> Contributions:
        """Return the contribution of every slot to a target, signed; exact in the layer whose output the target is.

        By layer, `[layer].top(10)`; and summed over layers, `.top(10, by="sample_id")`, `.total("label")`.

        target: an output unit, one for each example, or a function of the model's output that gives one number for each example; default:
        the unit with the largest output. Of a language model: "next token", the likeliest one; a token as text, with its tokenizer; or
        "completion", the log-probability of the inputs' `labels`. silent: as for attend(); what such slots contribute is zero.
        progress: called while optimizers with matrices as coefficients are replayed.
        """
        self._needs_training("contributions()")
        self._needs_model("contributions")
        self._needs_error_signals("contributions")
        self._warn()
        manifest = self.store.manifest
        reader = self._target_reader(inputs, rows, tokenizer)
        aim = reader.logit(target)
        chosen = list(manifest.layers)
        if layers is not None:
            names = self._chosen_layers(layers)
            chosen = [layer for layer in chosen if layer.name in names]
        self._needs_error_signals("contributions", [layer.name for layer in chosen])
        for layer in chosen:
            if manifest.keep != "totals" and (manifest.every > 1 or layer.projected_from is None):
                require_gradients(self.store, "contributions()", layer.parameters[0])
        in_network = [layer.in_network for layer in chosen]
        captured = run(self._query_model, in_network, inputs, reader.rows, manifest.batch_axis, aim)
        answers: dict[str, LayerContributions] = {}
        executor = self._executor.reporting(progress)
        for name, found in captured.layers.items():
            _, layer = self.store.layer(name)
            assert found.gradients is not None
            if layer.projected_from is not None:
                dtype = compute_dtype(self.store, layer.parameters[0])
                seen = ProjectedScorer.of(self.store, layer, self.end_step, found.queries, found.gradients, dtype)
                answers[name] = ProjectedContributions(seen, captured.target, silent=silent, executor=executor)
                continue
            scorer = ContributionScorer(
                self.store,
                layer,
                self.end_step,
                found.queries,
                found.gradients,
                compute_dtype(self.store, layer.parameters[0]),
                progress=progress,
            )
            answers[name] = LayerContributions(scorer, captured.target, silent=silent, executor=executor)
        return Contributions(self.store, answers)

    def influence(
        self,
        inputs: Any,
        *,
        target: Target = None,
        tokenizer: Any = None,
        method: str = "whitened",
        layers: str | Collection[str] | None = None,
        segments: int | Sequence[tuple[int, int]] = 15,
        sample: str | None = None,
        damping: float | None = None,
        size: int = 32,
        memory: int = 1 << 30,
        rows: int | None = None,
        silent: bool = False,
        loss_mean: str | None = None,
        progress: Progress | None = None,
    ) -> Influence:
        """Return what would change in a target without some of the training data: an estimate, positive for what supports it.

        target: a class, one for each example, or None, the model's answer: its margin, log(p / (1 − p)); or a function of the
        output that gives one number for each example. Of a language model, as for contributions(), with margins of tokens. method: "whitened" (gradients with curvature between them; any loss),
        "kernel" (the best; softmax cross-entropy, thousands of rows in a segment; memory: bytes for its N² numbers), "sketch" (the
        kernel through size × size random numbers for each layer). segments: at most this many epochs, spread over the run, or
        (begin, end) in steps; sample: the column by which epochs are counted, default `sample_id`. damping: relative to the
        mean curvature, 0.3 for "whitened", 1 for the others. silent: as for attend(); a row is silent if it wrote nothing in any layer.
        loss_mean: what the loss was a mean over, which is undone: "tokens", the positions that have a loss (of a classifier, its rows);
        "rows" of the batch; or "none", for a sum. Default: "tokens"; of a collection, what `collect` was told.
        """
        self._needs_model("influence")
        self._needs_error_signals("influence")
        if self.store.manifest.keep == "totals":
            raise NotRecordedError(
                f'influence() needs slots, but {self.store.location} keeps totals only. Record with keep="slots".'
            )
        self._warn()
        chosen = self._chosen_layers(layers)
        self._needs_error_signals("influence", chosen)
        reached = Reached()
        warned: set[str] = set()
        # The model may be large, so all segments share one copy of it, one after the other
        copies: list[nn.Module] = []

        def model_at(step: int) -> nn.Module:
            step = self._network.step_with_weights(step)
            weights = self._network.weights_at(step, reached=reached, warned=warned)
            if copies:
                self._network.load(copies[0], weights)
            else:
                copies.append(self._network.module(weights))
            return copies[0]

        return estimate(
            self.store,
            [layer for layer in self.store.manifest.layers if layer.name in chosen],
            self.end_step,
            model_at,
            self._target_reader(inputs, rows, tokenizer),
            target,
            Settings(method, segments, sample, damping, size, memory, silent, loss_mean or told_loss_mean(self.store)),
            progress,
            self._executor,
        )

    def sources(
        self,
        prompt: Prompt,
        completion: str | Sequence[int] | Tensor | None = None,
        *,
        tokenizer: Any = None,
        by: str | Sequence[str] = "sample_id",
        k: int = 10,
        method: str = "influence",
        documents: Any = None,
        layers: str | Collection[str] | None = None,
        where: Where | None = None,
        lowest: bool = False,
        segments: int | Sequence[tuple[int, int]] = 15,
        loss_mean: str | None = None,
        progress: Progress | None = None,
    ) -> Sources:
        """Return the k training documents that a completion of a prompt rests on most, in total and for each of its tokens.

        prompt: a text or a list of chat messages, with the tokenizer; or its tokens. completion: a text or tokens; default: the likeliest
        next token. by: the column that names documents. method: "influence", an estimate of how the completion's log-probability would
        change without a document; or "contribution", what it wrote to the weights, along that log-probability's gradient. documents: texts by
        what `by` names, if they were not recorded as `text`, a column of the rows or of the samples. layers, where: only these. lowest: what speaks against the completion.
        segments, loss_mean: as for influence().
        """
        self._needs_model("sources")
        asked = encode_completion(self._query_model, prompt, completion, tokenizer)
        answer: Influence | Contributions
        if method == "influence":
            answer = self.influence(
                asked.inputs,
                target=asked.target,
                layers=layers,
                rows=1,
                segments=segments,
                loss_mean=loss_mean,
                progress=progress,
            )
        elif method == "contribution":
            answer = self.contributions(asked.inputs, target=asked.target, layers=layers, rows=1, progress=progress)
        else:
            raise QuestionError(f'method={method!r}: expected "influence" or "contribution".')
        sums = answer.sums(by, where=where)
        return rank_documents(asked, method, sums, k, lowest, Texts([self.samples, self.rows], documents))

    def masked(
        self,
        *,
        only: Where | None = None,
        drop: Where | None = None,
        layers: str | Collection[str] | None = None,
        read: str = "fewest",
        workers: int = 1,
        progress: Progress | None = None,
    ) -> nn.Module:
        """Return a plain copy of the model whose layers remember only some of their slots, in evaluation mode.

        This edits memory: coefficients, clipping and decay stay as they were. It does not predict retraining.
        only: the slots that take part. drop: those that do not. read: "fewest": between two snapshots whichever are fewer, the slots
        kept or those left out, whose part is then taken from the weights as they were trained (SGD family; `mask_reads` counts them).
        "kept": every slot that is kept, on top of the initial part alone. They differ by no more than the gap that `verify` prints;
        only the second says anything about that gap. workers: how many threads rebuild parameters, one parameter each at a time. Each
        needs memory for a few matrices like it.
        """
        mask = self._mask(only, drop, "masked")
        self._warn()
        weights = masked_weights(self._network, mask, self._parameters(layers), read, workers, progress)
        return self._network.module(dict(weights))

    def mask_reads(
        self,
        *,
        only: Where | None = None,
        drop: Where | None = None,
        layers: str | Collection[str] | None = None,
    ) -> dict[str, int]:
        """Return how many slots masked() would read for each parameter: its cost is this times the parameter's size.

        0 where group deltas answer; between two snapshots the fewer of those kept and those left out; all, where an optimizer is
        replayed (Adam family).
        """
        return mask_reads(self._mask(only, drop, "mask_reads"), self._parameters(layers))

    def mislabelled(
        self,
        k: int | None = 100,
        *,
        by: str | Sequence[str] = "sample_id",
        layer: str | None = None,
        where: Where | None = None,
        reduction: str | None = None,
    ) -> pl.DataFrame:
        """Return the k training samples (None: all) that look most mislabelled, by the mean size of their error signals at the output.

        `score` is that mean over all visits, which are positions that had a loss, with a loss that takes a mean over such positions
        undone (reduction="sum": it took none; default "mean", or what `collect` was told). Evidence: `visits`; the columns that are one for all visits, such as a label; and, if
        the error signals are those of softmax cross-entropy, the output `unit` that it was trained as with its mean `probability`,
        what the model `said` instead (the likeliest other unit), and at how many visits its answer was `wrong`. layer: default the
        last one. A column of the recording that is called like one of these has `_recorded` behind its name.
        """
        if reduction is None:
            reduction = "sum" if told_loss_mean(self.store) == "none" else "mean"
        table = mislabelled(
            self.store, self.layers, self.end_step, k=k, by=by, layer=layer, where=where, reduction=reduction
        )
        self._warn()
        return table

    def explained(
        self, first: int = 0, last: int = -1, *, rows: bool = True, progress: Progress | None = None
    ) -> ExplainedMovement:
        """Return how much of the movement between two checkpoints of a collection its gradients explain, for each parameter.

        The movement is projected onto the mean gradient of the data at the first checkpoint, at the last, and at all from one to the other.
        first, last: the numbers of checkpoints; negative ones count from the end. rows: also fit a scale for each row at the first
        checkpoint, by ridge regression, where there are at most 2,048; `chance` says how much of a random movement that would explain.
        """
        weights_at = self._network.weights_at
        return explain_movement(self.store, self.end_step, weights_at, first, last, rows=rows, progress=progress)

    def compact(self, rank: int, *, layers: str | Collection[str] | None = None) -> Compact:
        """Return what layers learned in `rank` slots each (default: all layers that attend), the best that so few can do.

        Remark 3.4 of the paper. `["4"]` has `keys`, `values`, `error` and the `slots` replaced; `.model()` is a plain copy of
        the model with the compacted weights.
        """
        self._needs_training("compact()")
        self._needs_error_signals("compact")
        require_gradients(self.store, "compact()")
        self._warn()
        names = self._chosen_layers(layers)
        if layers is None:
            names = [name for name in names if self.store.layer(name)[1].attends]
        found = {name: compact(DualLayer(self.store, name, self.end_step), rank) for name in names}

        def model() -> nn.Module:
            weights = self._network.weights_at(self.end_step)
            for name, layer in found.items():
                weights |= compacted_weights(self.store.layer(name)[1], layer, weights)
            return self._network.module(weights)

        return Compact(found, model)

    def explore(self, train: Any = None, test: Any = None, **options: Any) -> Any:
        """Show this run in the browser: where predictions come from, and what happens without some memory.

        train: what the column `by` numbers, an array or dataset of inputs or (input, label) pairs; with by=("task", "sample_id"),
        a dictionary of such. test: inputs with labels, (inputs, labels) or a dataset, or a dictionary of such.
        Options: class_names=[…]; show=function of an input that gives an array, a text or a vector ("image" | "vector" | "text");
        by="sample_id"; label="label"; tokenizer=: of a Transformer, whose documents `by` names, for prompts; draw=function from ink (32, 32) to an input; title=; host="127.0.0.1"; port=0; browser=True;
        block=: whether to wait (default: not in a notebook). Returns the server, with `url`, which has the token that every
        visitor needs, and `close()`.
        """
        # The explorer imports this module, so it is imported only when somebody asks for it
        return import_module("dualform.explorer").explore(self, train, test, **options)

    # Inside

    @cached_property
    def _query_model(self) -> nn.Module:
        """A private copy of the model, which runs to get queries."""
        return self.model()

    def _target_reader(self, inputs: Any, rows: int | None, tokenizer: Any) -> TargetReader:
        count = count_rows(inputs, self.store.manifest.batch_axis) if rows is None else rows
        assert self._model is not None  # questions with a target have asked for it
        return TargetReader(inputs, count, predicts_next_token(self._model), tokenizer)

    def _warn(self) -> None:
        """Warn of inexact layers, with every answer."""
        for name, mark in marks(self.store, self.end_step).items():
            warnings.warn(
                f"layer {name!r} is inexact from step {mark.step} on: {mark.why}",
                InexactWarning,
                stacklevel=3,
            )

    def _needs_model(self, question: str) -> None:
        if not self._network.has_model:
            raise QuestionError(f"{question}() needs the model: dualform.open(path, model).")

    def _needs_training(self, question: str) -> None:
        refuse_collected(self.store, question)

    def _needs_error_signals(self, question: str, layers: Sequence[str] = ()) -> None:
        """Raise NotRecordedError if the error signals of some layers were not kept."""
        if self.store.manifest.keep == "keys":
            raise NotRecordedError(
                f'{question}() needs error signals, but {self.store.location} keeps keys only. Record with keep="slots".'
            )
        without = [name for name in layers if self.store.layer(name)[1].keep == "keys"]
        if without:
            raise NotRecordedError(
                f"{question}() needs error signals, but {self.store.location} keeps keys only of {', '.join(map(repr, without))}. Name the "
                f"others with layers=."
            )

    def _mask(self, only: Where | None, drop: Where | None, question: str) -> Mask:
        self._needs_training(f"{question}()")
        mask = make_mask(self.store, self.end_step, only, drop, question)
        self._needs_error_signals(question)
        if self.store.manifest.keep != "totals":
            require_gradients(self.store, f"{question}()")
        return mask

    def _chosen_layers(self, layers: str | Collection[str] | None) -> list[str]:
        """Return the names of layers that match any of these patterns; default: all."""
        if layers is None:
            return self.layers
        found = []
        for pattern in [layers] if isinstance(layers, str) else layers:
            names = [name for name in self.layers if fnmatchcase(name, pattern)]
            if not names:
                self.store.layer(pattern)  # raises an error that lists the layers
            found += names
        return found

    def _parameters(self, layers: str | Collection[str] | None) -> list[str]:
        """Return the parameters of some layers (default: all), each once."""
        names = self._chosen_layers(layers)
        chosen = [layer for layer in self.store.manifest.layers if layer.name in names]
        return list(dict.fromkeys(parameter for layer in chosen for parameter in layer.parameters))

    def _attention(self, name: str, queries: Tensor, silent: bool) -> LayerAttention:
        _, layer = self.store.layer(name)
        if not layer.attends:
            raise QuestionError(
                f"layer {name!r} is elementwise: it has no keys, hence no attention. Ask contributions()."
            )
        dtype = compute_dtype(self.store, layer.parameters[0])
        return LayerAttention(self.store, layer, self.end_step, queries, dtype, silent=silent, executor=self._executor)

    def _query_vectors(self, inputs: Any) -> dict[str, Tensor]:
        """Return query vectors by layer, (queries, positions, d_in) each."""
        if not isinstance(inputs, Mapping):
            raise QuestionError(
                "this recording was opened without a model, so attend() takes query vectors by layer name, e.g. "
                '{"4": vectors}; or open it with the model: dualform.open(path, model).'
            )
        return {name: _query_vectors(self.store.layer(name)[1], given) for name, given in inputs.items()}


def _query_vectors(layer: Layer, given: Any) -> Tensor:
    vectors = torch.as_tensor(given)
    if vectors.dim() not in (2, 3) or vectors.shape[-1] != layer.d_in:
        raise QuestionError(
            f"queries for layer {layer.name!r} have shape {tuple(vectors.shape)}; expected (queries, {layer.d_in}) or "
            f"(queries, positions, {layer.d_in})."
        )
    return vectors if vectors.dim() == 3 else vectors.unsqueeze(1)
