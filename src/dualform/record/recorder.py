"""The recorder: the one object a training loop sees."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import BatchError, DualformError, RecordingError, WriterError
from dualform.record.books import Books
from dualform.record.capture import Capture
from dualform.record.choose import Chosen, described
from dualform.record.columns import read_batch
from dualform.record.curvature import OnlineCurvature
from dualform.record.ledger import Ledger
from dualform.record.parameters import ParameterLedger
from dualform.record.totals import OnlineTotals
from dualform.store import format as store
from dualform.store import records
from dualform.store.writer import Writer

SNAPSHOT_SHARE = 8
"""Snapshots are taken when the slots since the last one take this many times its size: at most 1/8 more disk."""
STRETCH_BYTES = 32 << 20
"""How many bytes of slots are folded into totals at a time."""
SNAPSHOT_CHUNKS = 4
"""… and not before this many chunks' worth."""


def snapshot_of(model: nn.Module, books: Books) -> dict[str, Tensor]:
    """Copies of all weights and buffers, and of the optimizer state of recorded parameters."""
    tensors = {
        f"model.{name}": _copied(value)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and not nn.parameter.is_lazy(value) and not value.is_complex()
    }
    for ledger, name, value in books.optimizer_state():
        tensors[f"state.{ledger.name}.{name}"] = value.detach().cpu().clone().contiguous()
    return tensors


def _copied(value: Tensor) -> Tensor:
    """A copy in a type that can be stored: 16 and 8 bits that NumPy does not know become float32, exactly."""
    value = value.detach().cpu()
    known = value.dtype in (torch.float16, torch.float32, torch.float64) or not value.is_floating_point()
    return (value.clone() if known else value.float()).contiguous()


class Recorder:
    """Records until closed. Made by `dualform.record`; a context manager.

    It belongs to the thread that trains: do not call it, the model or the optimizer from several threads at once.
    """

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
        curvature: OnlineCurvature | None = None,
    ):
        self.path = writer.folder
        self._model, self._optimizers, self._chunk_bytes = model, optimizer, chunk_bytes
        self._writer, self._ledger, self._books = writer, ledger, books
        self._on_write_error, self._curvature = on_write_error, curvature
        self._totals, self._stretch, self._stretch_bytes = totals, list[records.Step](), 0
        self._columns: tuple[store.Column, ...] | None = writer.manifest.columns or None
        self._batches = 0
        self._next_step = writer.manifest.end_step
        self._open: records.Step | None = None
        self._stepped: set[int] = set()
        self._updating = False
        self._early_log: dict[str, float] = {}
        self._since_snapshot = 0
        self._checkpointed = self._only_totals and self._next_step > 0
        """Totals alone are those of one step. Once a checkpoint stands beside them, nothing but seal() and the end takes it away."""
        self._closed = False
        self._waiting = [
            (one, [ParameterLedger(-1, name, p, ledger.seed, vector=p.dim() < 2) for name, p in one.parameters.items()])
            for one in waiting
        ]
        self._optimized = self._count_optimized()
        books.remember(range(len(optimizer)), None)
        self._snapshot_bytes = sum(t.nbytes for t in snapshot_of(model, books).values())
        self._capture = Capture(model, self._ledger, before_forward=self._adopt if self._waiting else None)
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

    def batch(self, *unnamed: Any, **columns: Any) -> None:
        """Name the rows of the next forward pass: columns of integers, floats, strings or booleans.

        Each is a tensor, array or list of shape (rows,) or (rows, positions), or a scalar that stands for all rows.
        """
        if unnamed:
            raise BatchError("batch() takes columns by name: recorder.batch(sample_id=ids, label=labels).")
        if not self._alive():
            return
        batch = read_batch(self._batches, columns, self._columns)
        self._batches += 1
        if self._columns is None:
            if self._totals is not None:
                self._totals.check(batch.columns)
            self._columns = batch.columns
        self._ledger.rows.step = self._next_step
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
            self._checkpointed = self._only_totals
            self._guarded(self._seal_now)
        return self._next_step

    @property
    def _only_totals(self) -> bool:
        return self._writer.manifest.keep == "totals"

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
                if ended == "closed" or not self._checkpointed:
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
        if not self._closed and not self._writer.failed:
            return True
        if self._closed:
            if self._writer.failed and self._on_write_error == "stop":
                return False
            raise RecordingError(f"the recorder of {self.path} is closed. Record into a new folder.")
        return self._guarded(self._writer.check)

    def _guarded(self, work: Callable[..., object], *given: int) -> bool:
        """Do what may fail in the writer; False if it did and the training is to go on without us."""
        try:
            work(*given)
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
            if float(getattr(optimizer, "found_inf", None) or 0.0):  # a scaler's fused optimizer will skip this step
                return None
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
            if closure is None:
                self._guarded(self._update, number)
                return None

            def recorded() -> Any:
                loss = closure()
                if not self._closed:
                    self._guarded(self._update, number)
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
            self._books.remember([number], self._open)

        return hook

    def _update(self, number: int) -> None:
        """An optimizer is about to update its parameters: write it down as part of a step.

        A step holds one update of each optimizer; it stays open, for log(), until an optimizer steps again.
        """
        self._ledger.settle_early()
        if self._open is not None and number in self._stepped:
            self._finish_step()
        step = self._open or records.Step(self._next_step)
        if self._open is None:
            self._books.begin_step()
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
            if self._curvature is not None:
                self._curvature.add(step, [layer.layer for layer in self._ledger.layers])
            self._hand_over(step)
        enough = max(SNAPSHOT_SHARE * self._snapshot_bytes, SNAPSHOT_CHUNKS * self._chunk_bytes)
        if snapshot or (self._since_snapshot >= enough and not self._checkpointed):
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
            if self._only_totals:
                for block in step.blocks:
                    block.give_back(self._ledger.store_as.pool)
                step.drop_slots()
            self._writer.put(step, self._columns or ())
        self._stretch, self._stretch_bytes = [], 0

    def _seal(self) -> None:
        """A snapshot, and the totals, of now."""
        weights = snapshot_of(self._model, self._books)
        if self._curvature is not None:
            weights |= self._curvature.taken()
        self._snapshot_bytes = sum(t.nbytes for t in weights.values())
        if self._totals is not None and self._columns is not None:
            self._fold()
            sealed = self._totals.sealed(self._next_step, self._books.next_row, self._columns or ())
            self._snapshot_bytes += sealed.nbytes
            self._writer.totals(sealed, weights)
            self._writer.wait()  # totals may take half of the memory: they are written as they are, without a copy
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
                    "changed before a forward pass found it in an optimizer (call add_param_group before the forward pass, "
                    "not between it and the step)"
                    if changed
                    else "entered an optimizer too late for totals"
                )
                warnings.warn(f"not recorded: {one.name!r}: it {why}", stacklevel=2)
                continue
            known = {p.name for p in self._ledger.parameters.values()}
            module = self._ledger.enter(one.name, one.module, one.layers, one.parameters)
            new = {name: p for name, p in one.parameters.items() if name not in known}
            self._writer.add_layers(one.name, [layer.layer for layer in module.layers], described(new))
            self._capture.add(module)
