"""`dualform.record`: checks what the user said, and puts together everything that a recorder needs."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.forked import require_polars
from dualform.layers.projected import DEFAULT_SIZE
from dualform.layers.row_proof import BatchAxes
from dualform.record.choose import EXCLUDED, Choice, ChosenModule, choose, matching, summary
from dualform.record.curvature import EVERY, OnlineCurvature, counts_summed
from dualform.record.disk_space import DiskSpace
from dualform.record.exchange import Exchange
from dualform.record.finished import FinishedSteps, snapshot_of
from dualform.record.fixed_weights import collection_settings
from dualform.record.forward_pass import ON_UNCLEAR_ROWS, RowFinder
from dualform.record.keep import Keep, check_keep, check_patterns, refuse_contradictions
from dualform.record.manifest import new_manifest
from dualform.record.optimizers import optimizer_list, refuse_not_replayed, refuse_some_rows, warn_not_replayed
from dualform.record.outputs import keep_outputs
from dualform.record.passes import PendingPasses
from dualform.record.ranks import inner_network, is_parallel, ranks_of
from dualform.record.recorded import StoreAs
from dualform.record.recorder import Recorder
from dualform.record.recording import ON_WRITE_ERROR, Recording
from dualform.record.shard import agreed, begin_run, open_place, refuse_with_ranks
from dualform.record.steps import ON_UNEXPLAINED, StepBuilder
from dualform.record.totals import OnlineTotals, TotalsRequest, has_deltas, requested_groupings
from dualform.record.unsupported import refuse_unsupported
from dualform.store import format as store
from dualform.store.format import Grouping
from dualform.store.memory import Pool
from dualform.store.writer import Writer

PARTS = ("query", "slots", "remainder", "rounding", "target")
"""The other columns of `contributions().parts()`."""


def record(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | os.PathLike[str],
    *,
    layers: str | Collection[str] | None = None,
    exclude: str | Collection[str] | Mapping[str, str] = (),
    outputs: Mapping[str, Sequence[int]] | None = None,
    batch_axis: int | Mapping[str, int] | None = None,
    check_rows: bool = True,
    on_unclear_rows: str = "ask",
    dtype: str | None = None,
    keep: Keep = "slots",
    projection: int = DEFAULT_SIZE,
    every: int = 1,
    totals: TotalsRequest | str | None = None,
    totals_bytes: int = 1 << 30,
    curvature: bool | None = None,
    initial: str = store.INITIAL,
    on_unexplained: str = "raise",
    on_write_error: str = "raise",
    expected_steps: int | None = None,
    overwrite: bool = False,
    resume: bool | int = False,
    queue_bytes: int = 256 << 20,
    chunk_bytes: int = 64 << 20,
) -> Recorder:
    """Record the training of a model into the folder `path`, from now until the recorder is closed.

    layers: names or globs of `model.named_modules()`; by default, every layer that can be recorded. exclude: those to leave out, or
    {name: reason}.
    outputs: {layer: units} keeps the error signals of only some output units of a huge layer. Its attention weights stay complete, and so
    do contributions to these units; it cannot be masked, nor reconstructed between snapshots.
    batch_axis: the axis of the model's inputs that holds the rows, if it is not the first (1 for sequence-first models). Or, by the
    names or globs of layers whose rows cannot be found, the axis of their inputs.
    check_rows: prove that each slot gets the name of its own row, by running the first batch of each kind again with its rows permuted.
    on_unclear_rows: what to do where it is not clear which row a slot belongs to: "ask" (an error that says how to fix it), or "leave out"
    the rows of such slots.
    dtype: the type that slots are stored in. By default "float32", or "float64" if parameters are: exact up to training's own rounding.
    "float16" takes half the disk space, and so does "bfloat16", which stores what autocast computed without loss.
    keep: "slots" (everything), "rows" (the gradient of each row where that is smaller than its slots: every answer by row stays exact,
    single positions are lost), "projected" (the same through random matrices: small, and every answer is an estimate), "keys" (attention weights
    only; works with every optimizer) or "totals" (no slots: the store does not grow with the number of steps). Or, by names or globs of layers,
    what is kept of each, {"lm_head": "keys", "*": "rows"}: the first that fits counts, and each layer needs one.
    projection: how many numbers keep="projected" leaves of a key and of an error signal, at most.
    every: keep the slots of one step in so many. Sums over steps then are estimates, and weights cannot be rebuilt from slots.
    totals: columns (or tuples of columns) for whose groups totals are kept, in addition to slots. {"sample_id": "keys"} keeps only
    sums of keys, {"label": "deltas"} only parts of the weights. totals_bytes: how much memory they may take.
    curvature: estimate curvature while recording, in one of every eight steps, so that the first influence question need not do it. With
    keep="rows" or "projected", that of summed slots is estimated unless this is False: without it, there is no influence by method="whitened".
    initial: what the weights are when recording begins, "pretrained" for example. Contributions call their initial part so.
    on_unexplained: what to do when slots do not explain a gradient, or weights were edited: "raise", or "mark" the layer
    as inexact from that step on.
    on_write_error: "raise", or "stop" recording with a warning and let training continue (a full disk).
    expected_steps: after how many updates the training will end, to warn after 20 of them if the disk will be full before that. Without it,
    the warning comes when it will be full before there are twice as many.
    overwrite: replace an existing recording (nothing else is ever removed).
    resume: continue an existing recording, from its end (True) or from step n (an int). Slots after that step are dropped, and the
    weights are compared with what the store knows of them.
    queue_bytes: how much may wait for the disk before training waits. chunk_bytes: how much is sealed at a time.
    """
    require_polars()
    network = inner_network(model)
    ranks = ranks_of(model)
    with contextlib.nullcontext() if ranks is None else ranks.failing_together():
        _check_value("dtype", dtype, (None, *store.DTYPES))
        check_keep(keep, projection, every)
        _check_value("on_unclear_rows", on_unclear_rows, ON_UNCLEAR_ROWS)
        _check_value("on_unexplained", on_unexplained, ON_UNEXPLAINED)
        _check_value("on_write_error", on_write_error, ON_WRITE_ERROR)
        refuse_unsupported(network, optimizer)
        if not isinstance(model, nn.Module) or not isinstance(network, nn.Module):
            raise RecordingError(
                f"record() got {type(model).__name__!r} where it expected the nn.Module that is trained."
            )
        optimizers = optimizer_list(optimizer)
        store_as = StoreAs(dtype or "", keep, Pool(queue_bytes), projection=projection, every=every)
        one_keep = store_as.one_keep
        groupings = requested_groupings(totals, one_keep)
        refuse_contradictions(one_keep, every, groupings, has_outputs=bool(outputs), curvature=bool(curvature))
        _check_optimizers(optimizers, one_keep, groupings)

        choice = choose(network, optimizers, layers, exclude)
        if outputs:
            refuse_some_rows(optimizers)
        choice.recorded = keep_outputs(choice.recorded, outputs)
        check_patterns(keep, [layer.name for chosen in choice.recorded for layer in chosen.layers])
        axes = _checked_axes(batch_axis, choice.modules)
        _warn_of_left_out(choice.left_out)

        if ranks is not None:
            ranks.refuse_unsupported()
            refuse_with_ranks(groupings=groupings, curvature=bool(curvature), on_write_error=on_write_error)
            curvature = False
        files, earlier = open_place(path, ranks, resume, overwrite=overwrite)
        if earlier is None:
            seed = private_seed()
        else:
            seed = earlier.seed
            earlier.sort(choice.recorded)
        if ranks is not None:  # all see gradients through the same R
            seed = ranks.gather(seed)[0]
        exchange = None if ranks is None else Exchange(ranks, chunk_bytes)

        if dtype is None:
            dtype = _default_dtype(choice.recorded)
        # Sums of keys alone need no error signals, and no gradient is put together again from them
        needs_errors = one_keep != "totals" or has_deltas(groupings)
        all_layers = [store_as.stored(layer, seed) for chosen in choice.recorded for layer in chosen.layers]
        summed = [layer for layer in all_layers if layer.keep in store.SUMMED]
        counts_sums = bool(summed) and counts_summed(curvature, summed)
        store_as = replace(store_as, dtype=dtype, errors=needs_errors, curvature_every=EVERY if counts_sums else 0)
        rows = _row_finder(network, choice, axes, check=check_rows, on_unclear=on_unclear_rows)
        passes = PendingPasses(store_as=store_as, rows=rows, seed=seed)
        for chosen in choice.recorded:
            passes.enter(chosen.name, chosen.module, chosen.layers, chosen.parameters)
        steps = StepBuilder(passes, optimizers, on_unexplained=on_unexplained, exchange=exchange)
        steps.watch.refuse_shared()

        settings = {
            **_beginning(initial),
            **collection_settings(optimizers),
            **({} if ranks is None else ranks.settings),
        }
        manifest = new_manifest(passes, choice, axes, settings)
        if ranks is not None:
            manifest = agreed(ranks, manifest)
        kept_totals = None
        if earlier is not None:
            manifest = earlier.go_on(manifest, passes, steps, groupings)
            kept_totals = earlier.totals(groupings)
        weights = snapshot_of(network, steps)
        # DistributedDataParallel calls its module with what it was given itself
        called = model.get_submodule("module") if is_parallel(model) else model
        sums = OnlineTotals(manifest, groupings, totals_bytes, weights, kept_totals) if groupings else None
        curvatures = OnlineCurvature(only_summed=not curvature) if curvature or counts_sums else None
        writer = Writer(files, manifest, store_as.pool, weights, queue_bytes=queue_bytes, chunk_bytes=chunk_bytes)
        recording: Recording | None = None
        try:
            finished = FinishedSteps(network, writer, passes, steps, sums, curvatures, chunk_bytes)
            if one_keep != "totals":
                finished.disk_space = DiskSpace(writer, expected_steps)
            recording = Recording(network, called, writer, passes, steps, finished, choice.waiting, on_write_error)
            if ranks is not None:
                begin_run(path, ranks, manifest.run, is_new=earlier is None)
                recording.path = Path(path)
            return Recorder(recording)
        except BaseException:
            # The user has no recorder to close: unlock the folder and remove the hooks
            if recording is None:
                writer.abandon()
            else:
                recording.close_dropped()
            raise


def _beginning(initial: str) -> dict[str, str]:
    """What the manifest's settings say of the weights when recording began, if that is not what it usually is."""
    if initial in PARTS or not initial.strip():
        raise RecordingError(
            f'initial={initial!r}: expected a word for the weights that recording begins with, such as "pretrained".'
        )
    return {} if initial == store.INITIAL else {"initial": initial}


def _check_value(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        raise RecordingError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}.")


def _check_optimizers(optimizers: Sequence[Optimizer], keep: str, groupings: Sequence[Grouping]) -> None:
    if has_deltas(groupings):
        refuse_not_replayed(optimizers, "totals= of deltas")
    if keep not in ("keys", "totals"):
        warn_not_replayed(optimizers, stacklevel=4)


def _checked_axes(batch_axis: int | Mapping[str, int] | None, modules: Sequence[ChosenModule]) -> dict[str, int]:
    """Check batch_axis=. Returns axes by name or glob; the empty name stands for the inputs of the model itself."""
    if batch_axis is None:
        return {}
    axes = {"": batch_axis} if isinstance(batch_axis, int) else dict(batch_axis)
    names = [chosen.name for chosen in modules]
    layers = [layer.name for chosen in modules for layer in chosen.layers]
    for pattern, axis in axes.items():
        if type(axis) is not int or axis < 0:
            raise RecordingError(
                f"batch_axis={{{pattern!r}: {axis!r}}}: expected an axis counted from the front: 0, 1, …"
            )
        if not matching(["", *names, *layers], pattern):
            raise RecordingError(
                f"batch_axis names {pattern!r}, which is not recorded. Recorded layers: {', '.join(map(repr, names))}."
            )
    return axes


def _row_finder(model: nn.Module, choice: Choice, axes: dict[str, int], *, check: bool, on_unclear: str) -> RowFinder:
    owners = {}
    for chosen in choice.modules:
        for layer in chosen.layers:
            owners[layer.name] = chosen.name
    names = {module: name for name, module in model.named_modules()}
    return RowFinder(BatchAxes(axes, owners), names, check=check, on_unclear=on_unclear)


def _warn_of_left_out(left_out: Mapping[str, str]) -> None:
    """Warn of what is not recorded, except for what the user has excluded."""
    reasons = {name: reason for name, reason in left_out.items() if reason != EXCLUDED}
    if reasons:
        warnings.warn(f"not recorded: {summary(reasons)}", stacklevel=3)


def _default_dtype(modules: Sequence[ChosenModule]) -> str:
    """The type that slots are stored in by default."""
    for chosen in modules:
        for parameter in chosen.parameters.values():
            if parameter.dtype == torch.float64:
                return "float64"
    return "float32"


def private_seed() -> int:
    """Return an unpredictable seed for the audit's random matrices, without drawing from the user's random generators."""
    return int.from_bytes(os.urandom(6), "little")
