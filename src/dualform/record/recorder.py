"""The recorder: the one object a training loop sees."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import DualformError, RecordingError, WriterError
from dualform.record import optimizers, resuming
from dualform.record.books import Books
from dualform.record.capture import Capture
from dualform.record.choose import Chosen, choose, described
from dualform.record.columns import read_batch
from dualform.record.ledger import Ledger, ParameterLedger, StoreAs
from dualform.record.totals import OnlineTotals, Wanted, groupings
from dualform.store import format as store
from dualform.store import records
from dualform.store.encoding import Pool
from dualform.store.writer import Writer, prepare
from dualform.version import __version__

SNAPSHOT_SHARE = 8
"""Snapshots are taken when the slots since the last one take this many times its size: at most 1/8 more disk."""
STRETCH_BYTES = 32 << 20
"""How many bytes of slots are folded into totals at a time."""
SNAPSHOT_CHUNKS = 4
"""… and not before this many chunks' worth."""
ON_UNEXPLAINED = ("raise", "mark")
ON_WRITE_ERROR = ("raise", "stop")


def record(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | os.PathLike[str],
    *,
    layers: str | Collection[str] | None = None,
    outputs: Mapping[str, Sequence[int]] | None = None,
    batch_axis: Mapping[str, int] | None = None,
    dtype: str | None = None,
    keep: str = "slots",
    totals: Wanted | str | None = None,
    totals_bytes: int = 1 << 30,
    on_unexplained: str = "raise",
    on_write_error: str = "raise",
    overwrite: bool = False,
    resume: bool | int = False,
    queue_bytes: int = 256 << 20,
    chunk_bytes: int = 64 << 20,
) -> Recorder:
    """Record the training of a model into the folder `path`, from now until the recorder is closed.

    layers: names or globs of `model.named_modules()`; default: all that can be recorded.
    outputs: {layer: units} keeps error signals only for some output units of a huge layer; its attention weights stay whole,
    and so do contributions to these units; it cannot be masked, nor rebuilt between snapshots.
    batch_axis: for layers whose rows cannot be found, the axis of their input that holds them.
    dtype: how slots are stored; default: as the parameters, "float32" or "float64", which is exact to training's own
    rounding. "float16" takes half the disk.
    keep: "slots" (everything), "keys" (attention weights only; works with every optimizer) or "totals" (no slots: disk
    does not grow with the number of steps).
    totals: columns (or tuples of them) for whose groups totals are kept, also beside slots; {"sample_id": "keys"} keeps
    sums of keys only, {"label": "deltas"} parts of the weights only. totals_bytes: how much memory they may take.
    on_unexplained: what to do when slots do not explain a gradient, or weights were edited: "raise", or "mark" the layer
    as inexact from that step on.
    on_write_error: "raise", or "stop" recording with a warning and let the training go on (a full disk).
    overwrite: replace a recording that is already there (nothing else is ever removed).
    resume: go on with a recording that is already there, from its end (True) or from step n (an int): slots after it are
    dropped, and the weights are compared with what the store says they were.
    queue_bytes: how much may wait for the disk before training waits. chunk_bytes: how much is sealed at a time.
    """
    for name, given, allowed in (
        ("dtype", dtype, (None, *store.DTYPES)),
        ("keep", keep, store.KEEPS),
        ("on_unexplained", on_unexplained, ON_UNEXPLAINED),
        ("on_write_error", on_write_error, ON_WRITE_ERROR),
    ):
        if given not in allowed:
            raise RecordingError(f"{name}={given!r}: expected one of {', '.join(map(repr, allowed))}.")
    if not isinstance(model, nn.Module):
        raise RecordingError(f"record() got {type(model).__name__!r} where it expected the nn.Module that is trained.")
    refuse_wrapped(model)
    several = optimizers.listed(optimizer)
    wanted = groupings(totals, keep)
    if keep != "keys":
        optimizers.require_replay(several)
    chosen, waiting, left_out = choose(model, several, layers, outputs)
    if outputs and any(grouping.kind != "keys" for grouping in wanted):
        raise RecordingError('outputs= keeps a part of the error signals: totals of it can be of "keys" only.')
    for name, axis in (batch_axis or {}).items():
        if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
            raise RecordingError(f"batch_axis={{{name!r}: {axis!r}}}: expected an axis counted from the front: 0, 1, …")
        if name not in {n for one in (*chosen, *waiting) for n in (one.name, *(layer.name for layer in one.layers))}:
            raise RecordingError(
                f"batch_axis names {name!r}, which is not recorded. Recorded layers: "
                f"{', '.join(repr(one.name) for one in chosen)}."
            )
    if left_out:
        listed = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        warnings.warn(f"not recorded: {listed}", stacklevel=2)
    if dtype is None:
        wide = any(p.dtype == torch.float64 for one in chosen for p in one.parameters.values())
        dtype = "float64" if wide else "float32"
    folder = Path(path)
    seed = int.from_bytes(os.urandom(6), "little")
    if resume is False:
        prepare(folder, overwrite=overwrite)
        before = None
    else:
        before = resuming.manifest(folder, None if resume is True else resume)
        seed = int(before.settings["seed"])
    if before is not None:  # layers that entered during training come last in the store
        order = {layer.name: number for number, layer in enumerate(before.layers)}
        chosen.sort(key=lambda one: order.get(one.layers[0].name, len(order)))
    ledger = Ledger(store_as=StoreAs(dtype, keep, Pool(queue_bytes)), batch_axis=dict(batch_axis or {}), seed=seed)
    books = Books(ledger, several, keep=keep, on_unexplained=on_unexplained)
    for one in chosen:
        ledger.enter(one.name, one.module, one.layers, one.parameters)
    manifest = store.Manifest(
        version=store.VERSION,
        created_by=f"dualform {__version__}, torch {torch.__version__}",
        keep=keep,
        dtype=dtype,
        layers=tuple(layer.layer for layer in ledger.layers),
        parameters=tuple(described({p.name: p.parameter for p in ledger.parameters.values()})),
        left_out=left_out,
        batch_axis=dict(batch_axis or {}),
        settings={"seed": str(seed)},
    )
    kept = None
    if before is not None:
        manifest = resuming.go_on(folder, before, manifest, ledger, books)
        kept = resuming.totals(folder, manifest, wanted)
        manifest = manifest if wanted else replace(manifest, totals=None)
    weights = snapshot_of(model, books)
    sums = OnlineTotals(manifest, wanted, totals_bytes, weights, kept) if wanted else None
    pool = ledger.store_as.pool
    writer = Writer(folder, manifest, pool, weights, queue_bytes=queue_bytes, chunk_bytes=chunk_bytes)
    return Recorder(model, several, writer, ledger, books, sums, waiting, on_write_error, chunk_bytes)


def snapshot_of(model: nn.Module, books: Books) -> dict[str, Tensor]:
    """Copies of all weights and buffers, and of the optimizer state of recorded parameters."""
    tensors = {
        f"model.{name}": value.detach().cpu().clone().contiguous()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    for ledger, name, value in books.optimizer_state():
        tensors[f"state.{ledger.name}.{name}"] = value.detach().cpu().clone().contiguous()
    return tensors


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse models that run as something else than themselves."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise RecordingError(
            f"{type(model).__name__} runs copies of the model, whose slots would have to be put together: not recorded yet. Train "
            f"with a single process and device, record(model.module, …)."
        )
    if hasattr(model, "_orig_mod") or any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
        raise RecordingError(
            "the model is compiled (torch.compile): hooks inside a compiled graph see no error signals. Record the model "
            "without compiling it."
        )


class Recorder:
    """Records until closed. Made by `dualform.record`; a context manager."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: list[Optimizer],
        writer: Writer,
        ledger: Ledger,
        books: Books,
        totals: OnlineTotals | None,
        waiting: list[Chosen],
        on_write_error: str,
        chunk_bytes: int,
    ):
        self.path = writer.folder
        self._model, self._optimizers, self._chunk_bytes = model, optimizer, chunk_bytes
        self._writer, self._ledger, self._books = writer, ledger, books
        self._on_write_error = on_write_error
        self._totals, self._stretch, self._stretch_bytes = totals, list[records.Step](), 0
        self._columns: tuple[store.Column, ...] | None = writer.manifest.columns or None
        self._batches = 0
        self._next_step = writer.manifest.end_step
        self._open: records.Step | None = None
        self._stepped: set[int] = set()
        self._updating = False
        self._early_log: dict[str, float] = {}
        self._since_snapshot = 0
        self._closed = False
        self._waiting = [
            (one, [ParameterLedger(-1, name, p, ledger.seed) for name, p in one.parameters.items()]) for one in waiting
        ]
        self._optimized = self._count_optimized()
        books.remember(range(len(optimizer)), None)
        self._snapshot_bytes = sum(t.nbytes for t in snapshot_of(model, books).values())
        self._capture = Capture(model, self._ledger, before_forward=self._adopt)
        for module in self._ledger.modules:
            self._capture.add(module)
        self._handles = [
            handle
            for number, one in enumerate(optimizer)
            for handle in (
                one.register_step_pre_hook(self._before_step(number)),
                one.register_step_post_hook(self._after_step(number)),
            )
        ]

    @property
    def step(self) -> int:
        """How many steps have been recorded."""
        return self._next_step

    def batch(self, **columns: Any) -> None:
        """Name the rows of the next forward pass: columns of integers, floats, strings or booleans.

        Each is a tensor, array or list of shape (rows,) or (rows, positions), or a scalar that stands for all rows.
        """
        if not self._alive():
            return
        batch = read_batch(self._batches, columns, self._columns)
        self._batches += 1
        if self._columns is None:
            if self._totals is not None:
                self._totals.check(batch.columns)
            self._columns = batch.columns
        self._ledger.begin(batch)

    def log(self, **scalars: float) -> None:
        """Keep numbers beside a step: the last one, or the coming one if its backward pass has begun."""
        if not self._alive():
            return
        numbers = {n: v.item() if isinstance(v, Tensor) else float(v) for n, v in scalars.items()}
        if self._open is None or self._ledger.pending:
            self._early_log.update(numbers)
        else:
            self._open.log.update(numbers)

    def seal(self) -> int:
        """Seal everything so far with a snapshot and wait for the disk; call it when you save a checkpoint.

        Gives the number of steps: `resume=` takes it.
        """
        if self._alive():
            self._guarded(self._seal_now)
        return self._next_step

    def _seal_now(self) -> None:
        self._finish_step(snapshot=True)
        self._writer.wait()

    def close(self) -> None:
        """Seal everything and leave model and optimizers as they were. Called by leaving the `with` block."""
        self._close("closed")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close("closed")
            return
        with contextlib.suppress(DualformError):  # the loop's own error matters more than ours
            self._close(kind.__name__)

    def _close(self, ended: str) -> None:
        if self._closed:
            return
        self._detach()
        if self._updating:  # the optimizer never finished this step
            self._open = None
            self._next_step -= 1
        changes = self._books.changes()
        try:
            self._finish_step()
            if not changes:
                self._seal()
            else:
                self._fold()
                names = ", ".join(sorted(changes))
                whole = ended == "closed"
                ended = f"{ended}; {names} changed after the last step"
                if whole:  # else an error is on its way that says so
                    warnings.warn(
                        f"{names}: changed after the last step by something else than the optimizer, so the model's "
                        f"weights are not those that were trained and are not stored. The slots are whole up to step "
                        f"{self._next_step}.",
                        stacklevel=3,
                    )
            self._writer.close(ended, self._never_called() if ended == "closed" else {})
        except WriterError as error:
            self._writer.abandon()
            self._stop_or_raise(error)

    def _never_called(self) -> dict[str, str]:
        """Layers that had no part in the training: named once, at the end."""
        idle = [layer.layer.name for one in self._ledger.modules if not one.called for layer in one.layers]
        if idle and self._next_step:
            warnings.warn(f"not recorded: {', '.join(map(repr, idle))}: never called in training", stacklevel=4)
        return dict.fromkeys(idle, "it was never called in training")

    def _detach(self) -> None:
        self._closed = True
        self._capture.remove()
        for handle in self._handles:
            handle.remove()

    def _alive(self) -> bool:
        """Whether recording goes on; False after a write error, if the user asked for that."""
        if self._closed:
            if self._writer.failed and self._on_write_error == "stop":
                return False
            raise RecordingError(f"the recorder of {self.path} is closed. Record into a new folder.")
        return self._guarded(self._writer.check)

    def _guarded(self, work: Callable[[], object]) -> bool:
        """Do what may fail in the writer; False if it did and the training is to go on without us."""
        try:
            work()
        except WriterError as error:
            self._detach()
            self._writer.abandon()
            self._stop_or_raise(error)
            return False
        return True

    def _stop_or_raise(self, error: WriterError) -> None:
        if self._on_write_error == "raise":
            raise error
        warnings.warn(f"recording has stopped, the training goes on: {error}", stacklevel=4)

    # One step: the optimizer's hooks

    def _before_step(self, number: int) -> Callable[..., Any]:
        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._alive():
                return None
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
            if closure is None:
                self._guarded(lambda: self._update(number))
                return None

            def recorded() -> Any:
                loss = closure()
                if not self._closed:
                    self._guarded(lambda: self._update(number))
                return loss

            if "closure" in kwargs:
                return args, {**kwargs, "closure": recorded}
            return (args[0], recorded, *args[2:]), kwargs

        return hook

    def _after_step(self, number: int) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._updating = False
            if self._closed:
                return
            with np.errstate(all="ignore"):
                self._books.remember([number], self._open)

        return hook

    def _update(self, number: int) -> None:
        """An optimizer is about to update its parameters: write it down as part of a step.

        A step holds one update of each optimizer; it stays open, for log(), until an optimizer steps again.
        """
        if self._open is not None and number in self._stepped:
            self._finish_step()
        step = self._open or records.Step(self._next_step)
        if self._open is None:
            self._books.begin_step()
        with np.errstate(all="ignore"):  # what has diverged may overflow when it is looked at
            self._books.settle_changes(step)
            self._books.update(number, step)
        if self._open is None:
            self._open, self._stepped = step, set()
            self._next_step += 1
            step.log.update(self._early_log)
            self._early_log.clear()
        self._stepped.add(number)
        self._updating = True
        self._ledger.pending = False

    def _finish_step(self, *, snapshot: bool = False) -> None:
        """Hand the open step to the writer; log() may still have added to it until now."""
        if self._open is not None:
            step, self._open = self._open, None
            self._since_snapshot += step.nbytes
            self._hand_over(step)
        enough = max(SNAPSHOT_SHARE * self._snapshot_bytes, SNAPSHOT_CHUNKS * self._chunk_bytes)
        if snapshot or self._since_snapshot >= enough:
            self._seal()

    def _hand_over(self, step: records.Step) -> None:
        """Give a step to the writer, after it has been folded into the totals with others of its stretch."""
        if self._totals is None:
            self._writer.put(step, self._columns or ())
            return
        self._totals.add(step)
        self._stretch.append(step)
        self._stretch_bytes += step.nbytes
        if self._stretch_bytes >= STRETCH_BYTES:
            self._fold()

    def _fold(self) -> None:
        if self._totals is None:
            return
        self._totals.fold()
        for step in self._stretch:
            if self._writer.manifest.keep == "totals":
                for block in step.blocks:
                    block.give_back(self._ledger.store_as.pool)
                step.drop_slots()
            self._writer.put(step, self._columns or ())
        self._stretch, self._stretch_bytes = [], 0

    def _seal(self) -> None:
        """A snapshot, and the totals, of now."""
        weights = snapshot_of(self._model, self._books)
        self._snapshot_bytes = sum(t.nbytes for t in weights.values())
        if self._totals is not None and self._columns is not None:
            self._fold()
            sealed = self._totals.sealed(self._next_step, self._books.next_row, self._columns or ())
            self._snapshot_bytes += sealed.nbytes
            self._writer.totals(sealed, weights)
        else:
            self._writer.snapshot(self._next_step, weights)
        self._since_snapshot = 0

    # Layers whose parameters are added to an optimizer during training

    def _count_optimized(self) -> int:
        return sum(len(group["params"]) for one in self._optimizers for group in one.param_groups)

    def _adopt(self) -> None:
        """Before a forward pass: has add_param_group brought in a layer that was left out?"""
        if not self._waiting or self._count_optimized() == self._optimized:
            return
        self._optimized = self._count_optimized()
        optimized = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        for one, watched in list(self._waiting):
            if not any(id(p) in optimized for p in one.parameters.values()):
                continue
            self._waiting = [other for other in self._waiting if other[0] is not one]
            changed = any(ledger.changed() for ledger in watched)
            if changed or self._totals is not None:
                why = (
                    "changed before it entered an optimizer" if changed else "entered an optimizer too late for totals"
                )
                warnings.warn(f"not recorded: {one.name!r}: it {why}", stacklevel=2)
                continue
            known = {p.name for p in self._ledger.parameters.values()}
            module = self._ledger.enter(one.name, one.module, one.layers, one.parameters)
            new = {name: p for name, p in one.parameters.items() if name not in known}
            self._writer.add_layers(one.name, [layer.layer for layer in module.layers], described(new))
            self._capture.add(module)
