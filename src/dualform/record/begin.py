"""`dualform.record`: what the user said is checked, and everything that a recorder needs is put together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.forked import require_polars
from dualform.layers.row_proof import BatchAxes
from dualform.record import optimizers, resuming
from dualform.record.choose import EXCLUDED, Chosen, choose, described, in_short
from dualform.record.curvature import OnlineCurvature
from dualform.record.finished import snapshot_of
from dualform.record.forward_pass import ON_UNCLEAR_ROWS, RowFinder
from dualform.record.frozen import base_of
from dualform.record.passes import PendingPasses
from dualform.record.recorded import StoreAs
from dualform.record.recorder import Recorder
from dualform.record.recording import Recording, Settings
from dualform.record.steps import StepBuilder
from dualform.record.totals import OnlineTotals, TotalsRequest, groupings
from dualform.record.unsupported import refuse_unsupported
from dualform.store import format as store
from dualform.store.files import files_at
from dualform.store.lock import prepare
from dualform.store.memory import Pool
from dualform.store.tensors import tensor_checksum
from dualform.store.writer import Writer
from dualform.version import __version__

ON_UNEXPLAINED = ("raise", "mark")
ON_WRITE_ERROR = ("raise", "stop")


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
    keep: str = "slots",
    totals: TotalsRequest | str | None = None,
    totals_bytes: int = 1 << 30,
    curvature: bool = False,
    on_unexplained: str = "raise",
    on_write_error: str = "raise",
    overwrite: bool = False,
    resume: bool | int = False,
    queue_bytes: int = 256 << 20,
    chunk_bytes: int = 64 << 20,
) -> Recorder:
    """Record the training of a model into the folder `path`, from now until the recorder is closed.

    layers: names or globs of `model.named_modules()`; default: all that can be recorded. exclude: those to leave out, or {name: reason}.
    outputs: {layer: units} keeps error signals only for some output units of a huge layer; its attention weights stay whole,
    and so do contributions to these units; it cannot be masked, nor rebuilt between snapshots.
    batch_axis: the axis of the model's inputs that holds the rows, if it is not the first (1 for sequence-first models); or, by the
    names or globs of layers whose rows cannot be found, the axis of their inputs.
    check_rows: prove that each slot gets the name of its own row, by running the first batch of each kind again with its rows permuted.
    on_unclear_rows: what to do where it is not clear which row a slot belongs to: "ask" (an error that names the cure), or "leave out"
    the rows of such slots.
    dtype: how slots are stored; default: as the parameters, "float32" or "float64", which is exact to training's own
    rounding. "float16" takes half the disk, and so does "bfloat16", which stores what autocast made without loss.
    keep: "slots" (everything), "keys" (attention weights only; works with every optimizer) or "totals" (no slots: disk
    does not grow with the number of steps).
    totals: columns (or tuples of them) for whose groups totals are kept, also beside slots; {"sample_id": "keys"} keeps
    sums of keys only, {"label": "deltas"} parts of the weights only. totals_bytes: how much memory they may take.
    curvature: count it while recording, in one step of eight, so that the first question for influence need not.
    on_unexplained: what to do when slots do not explain a gradient, or weights were edited: "raise", or "mark" the layer
    as inexact from that step on.
    on_write_error: "raise", or "stop" recording with a warning and let the training go on (a full disk).
    overwrite: replace a recording that is already there (nothing else is ever removed).
    resume: go on with a recording that is already there, from its end (True) or from step n (an int): slots after it are
    dropped, and the weights are compared with what the store says they were.
    queue_bytes: how much may wait for the disk before training waits. chunk_bytes: how much is sealed at a time.
    """
    require_polars()
    for name, given, allowed in (
        ("dtype", dtype, (None, *store.DTYPES)),
        ("keep", keep, store.KEEPS),
        ("on_unclear_rows", on_unclear_rows, ON_UNCLEAR_ROWS),
        ("on_unexplained", on_unexplained, ON_UNEXPLAINED),
        ("on_write_error", on_write_error, ON_WRITE_ERROR),
    ):
        if given not in allowed:
            raise RecordingError(f"{name}={given!r}: expected one of {', '.join(map(repr, allowed))}.")
    refuse_unsupported(model, optimizer)
    if not isinstance(model, nn.Module):
        raise RecordingError(f"record() got {type(model).__name__!r} where it expected the nn.Module that is trained.")
    if curvature and keep != "slots":
        raise RecordingError(
            f'curvature=True needs keep="slots": influence asks for slots, and keep={keep!r} has none.'
        )
    outer = model
    model = getattr(model, "_orig_mod", model)  # what torch.compile() wraps
    several = optimizers.listed(optimizer)
    wanted = groupings(totals, keep)
    if any(grouping.kind != "keys" for grouping in wanted):
        optimizers.refuse_not_replayed(several, "totals= of deltas")
    if keep == "slots":
        optimizers.warn_not_replayed(several)
    chosen, waiting, left_out = choose(model, several, layers, exclude, outputs)
    if outputs:
        optimizers.refuse_some_rows(several)
    if outputs and any(grouping.kind != "keys" for grouping in wanted):
        raise RecordingError('outputs= keeps a part of the error signals: totals of it can be of "keys" only.')
    base = base_of(model, several, {id(p) for one in chosen for p in one.parameters.values()})
    waiting = [one for one in waiting if not base.keys() & one.parameters.keys()]
    axes = _checked_axes(batch_axis, [*chosen, *waiting])
    unasked = {name: reason for name, reason in left_out.items() if reason != EXCLUDED}
    if unasked:
        warnings.warn(f"not recorded: {in_short(unasked)}", stacklevel=2)
    if dtype is None:
        wide = any(p.dtype == torch.float64 for one in chosen for p in one.parameters.values())
        dtype = "float64" if wide else "float32"
    files = files_at(path)
    seed = private_seed()
    if resume is False:
        prepare(files, overwrite=overwrite)
        before = None
    else:
        before = resuming.manifest(files, None if resume is True else resume)
        seed = int(before.settings["seed"])
    if before is not None:  # layers that entered during training come last in the store
        order = {layer.name: number for number, layer in enumerate(before.layers)}
        chosen.sort(key=lambda one: order.get(one.layers[0].name, len(order)))
    # Sums of keys alone need no error signals, and no gradient is put together again from them
    errors = keep != "totals" or any(grouping.kind != "keys" for grouping in wanted)
    owners = {layer.name: one.name for one in (*chosen, *waiting) for layer in one.layers}
    names = {module: name for name, module in model.named_modules()}
    rows = RowFinder(BatchAxes(axes, owners), names, check=check_rows, on_unclear=on_unclear_rows)
    passes = PendingPasses(store_as=StoreAs(dtype, keep, Pool(queue_bytes), errors), rows=rows, seed=seed)
    steps = StepBuilder(passes, several, keep=keep, on_unexplained=on_unexplained)
    for one in chosen:
        passes.enter(one.name, one.module, one.layers, one.parameters)
    manifest = store.Manifest(
        version=store.VERSION,
        created_by=f"dualform {__version__}, torch {torch.__version__}",
        keep=keep,
        dtype=dtype,
        layers=tuple(layer.layer for layer in passes.layers),
        parameters=tuple(described({p.name: p.tensor for p in passes.parameters.values()})),
        left_out=left_out,
        batch_axis=axes,
        settings={"seed": str(seed)},
        base={name: tensor_checksum(tensor) for name, tensor in base.items()},
    )
    steps.watch.refuse_shared()
    kept = None
    if before is not None:
        manifest = resuming.go_on(files, before, manifest, passes, steps)
        kept = resuming.totals(files, manifest, wanted)
        manifest = manifest if wanted else replace(manifest, totals=None)
    weights = snapshot_of(model, steps)
    sums = OnlineTotals(manifest, wanted, totals_bytes, weights, kept) if wanted else None
    pool = passes.store_as.pool
    writer = Writer(files, manifest, pool, weights, queue_bytes=queue_bytes, chunk_bytes=chunk_bytes)
    recording: Recording | None = None
    try:
        counted = OnlineCurvature() if curvature else None
        settings = Settings(on_write_error, chunk_bytes)
        recording = Recording(model, outer, several, writer, passes, steps, sums, counted, waiting, settings)
        return Recorder(recording)
    except BaseException:
        # Nobody else can unlock the folder and remove the hooks
        if recording is None:
            writer.abandon()
        else:
            recording.close_dropped()
        raise


def _checked_axes(batch_axis: int | Mapping[str, int] | None, modules: Sequence[Chosen]) -> dict[str, int]:
    """What the user said in batch_axis=: a number is the axis of the model's own inputs, whose name is empty."""
    axes = {"": batch_axis} if isinstance(batch_axis, int) else dict(batch_axis or {})
    names = {"", *(one.name for one in modules), *(layer.name for one in modules for layer in one.layers)}
    for pattern, axis in axes.items():
        if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
            raise RecordingError(
                f"batch_axis={{{pattern!r}: {axis!r}}}: expected an axis counted from the front: 0, 1, …"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecordingError(
                f"batch_axis names {pattern!r}, which is not recorded. Recorded layers: "
                f"{', '.join(repr(one.name) for one in modules)}."
            )
    return axes


def private_seed() -> int:
    """Return an unpredictable seed for the audit's random matrices, without drawing from the user's random generators."""
    return int.from_bytes(os.urandom(6), "little")
