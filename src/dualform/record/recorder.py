"""The recorder: the one object a training loop sees."""

from __future__ import annotations

import contextlib
import os
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import RecordingError, UnexplainedError
from dualform.record import audit, optimizers
from dualform.record.capture import Capture
from dualform.record.choose import Chosen, choose
from dualform.record.columns import Batch, read_batch
from dualform.record.ledger import Ledger, Pass, StoreAs, Watched, roundoff
from dualform.store import format as store
from dualform.store import records
from dualform.store.encoding import Pool
from dualform.store.writer import Writer, prepare
from dualform.version import __version__

SNAPSHOT_SHARE = 8
"""Snapshots are taken when the slots since the last one take this many times its size: at most 1/8 more disk."""
SNAPSHOT_CHUNKS = 4
"""… and not before this many chunks' worth."""


def record(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | os.PathLike[str],
    *,
    layers: str | Collection[str] | None = None,
    batch_axis: Mapping[str, int] | None = None,
    dtype: str = "float32",
    keep: str = "slots",
    overwrite: bool = False,
    queue_bytes: int = 256 << 20,
    chunk_bytes: int = 64 << 20,
) -> Recorder:
    """Record the training of a model into the folder `path`, from now until the recorder is closed.

    layers: names or globs of `model.named_modules()`; default: all that can be recorded.
    batch_axis: for layers whose rows cannot be found, the axis of their input that holds them.
    dtype: how slots are stored. "float32" is exact to training's own rounding; "float16" takes half the disk.
    keep: "slots" (everything) or "keys" (attention weights only; works with every optimizer).
    overwrite: replace a recording that is already there (nothing else is ever removed).
    queue_bytes: how much may wait for the disk before training waits. chunk_bytes: how much is sealed at a time.
    """
    if dtype not in store.DTYPES:
        raise RecordingError(f"dtype={dtype!r}: expected one of {', '.join(store.DTYPES)}.")
    if keep not in store.KEEPS:
        raise RecordingError(f"keep={keep!r}: expected one of {', '.join(store.KEEPS)}.")
    if not isinstance(model, nn.Module):
        raise RecordingError(f"record() got {type(model).__name__!r} where it expected the nn.Module that is trained.")
    several = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if keep == "slots":
        optimizers.require_replay(several)
    chosen, left_out = choose(model, several, layers)
    for name in batch_axis or {}:
        if name not in {layer.name for layer in chosen}:
            raise RecordingError(
                f"batch_axis names {name!r}, which is not recorded. Recorded layers: "
                f"{', '.join(repr(layer.name) for layer in chosen)}."
            )
    if left_out:
        listed = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        warnings.warn(f"not recorded: {listed}", stacklevel=2)
    folder = Path(path)
    prepare(folder, overwrite=overwrite)
    return Recorder(
        model, several, folder, chosen, left_out, dict(batch_axis or {}), dtype, keep, queue_bytes, chunk_bytes
    )


@dataclass(frozen=True)
class _Place:
    """Where a parameter lives."""

    number: int
    layer: int
    short: str
    name: str


class Recorder:
    """Records until closed. Made by `dualform.record`; a context manager."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: list[Optimizer],
        folder: Path,
        chosen: list[Chosen],
        left_out: dict[str, str],
        batch_axis: dict[str, int],
        dtype: str,
        keep: str,
        queue_bytes: int,
        chunk_bytes: int,
    ):
        self.path = folder
        self._model, self._optimizers, self._keep = model, optimizer, keep
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        store_as = StoreAs(dtype, keep, Pool(queue_bytes))
        self._ledger = Ledger(chosen, store_as=store_as, batch_axis=batch_axis, generator=generator)
        self._places: dict[int, _Place] = {}
        described, parameters = [], []
        for number, layer in enumerate(chosen):
            names = {}
            for short, parameter in self._ledger.layers[number].parameters().items():
                names[short] = f"{layer.name}.{short}" if layer.name else short
                self._places[id(parameter)] = _Place(len(parameters), number, short, names[short])
                kind = str(parameter.dtype).removeprefix("torch.")
                parameters.append(store.Parameter(names[short], tuple(parameter.shape), kind))
            ledger = self._ledger.layers[number]
            described.append(
                store.Layer(
                    layer.name, layer.rule.kind, ledger.d_in, ledger.d_out, names["weight"], names.get("bias")
                )
            )
        manifest = store.Manifest(
            version=store.VERSION,
            created_by=f"dualform {__version__}, torch {torch.__version__}",
            keep=keep,
            dtype=dtype,
            layers=tuple(described),
            parameters=tuple(parameters),
            left_out=left_out,
            batch_axis=batch_axis,
        )
        self._writer = Writer(folder, manifest, store_as.pool, queue_bytes=queue_bytes, chunk_bytes=chunk_bytes)
        self._chunk_bytes = chunk_bytes
        self._columns: tuple[store.Column, ...] | None = None
        self._batches = 0
        self._next_row = 0
        self._next_step = 0
        self._open: records.Step | None = None
        self._rows_of: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._updating = False
        self._early_log: dict[str, float] = {}
        self._since_snapshot = 0
        self._closed = False
        weights = self._weights()
        self._snapshot_bytes = sum(t.nbytes for t in weights.values())
        self._writer.snapshot(0, weights)
        self._capture = Capture(model, chosen, self._ledger)
        self._handles = [
            handle
            for number, one in enumerate(optimizer)
            for handle in (
                one.register_step_pre_hook(self._before_step(number)),
                one.register_step_post_hook(self._after_step(number)),
            )
        ]

    def batch(self, **columns: Any) -> None:
        """Name the rows of the next forward pass: columns of integers, floats, strings or booleans.

        Each is a tensor, array or list of shape (rows,) or (rows, positions), or a scalar that stands for all rows.
        """
        self._alive()
        batch = read_batch(self._batches, columns, self._columns)
        self._batches += 1
        if self._columns is None:
            self._columns = batch.columns
        self._ledger.begin(batch)

    def log(self, **scalars: float) -> None:
        """Keep numbers beside a step: the last one, or the coming one if its backward pass has begun."""
        self._alive()
        numbers = {name: float(value) for name, value in scalars.items()}
        if self._open is None or self._ledger.pending:
            self._early_log.update(numbers)
        else:
            self._open.log.update(numbers)

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
        # The loop's own error matters more than ours
        with contextlib.suppress(Exception):
            self._close(kind.__name__)

    def _close(self, ended: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._capture.remove()
        for handle in self._handles:
            handle.remove()
        if self._updating:  # the optimizer never finished this step
            self._open = None
        moved = self._moved()
        self._finish_step()
        if moved is None and self._next_step:
            self._writer.snapshot(self._next_step, self._weights())
        elif moved is not None:
            ended = f"{ended}; {moved} was changed after step {self._next_step - 1}"
            warnings.warn(
                f"{moved} was changed by something else than its optimizer after the last step, so the final weights "
                f"of the model are not those that were trained: they are not stored. The store is whole up to there.",
                stacklevel=3,
            )
        self._writer.close(ended)

    def _alive(self) -> None:
        if self._closed:
            raise RecordingError(f"the recorder of {self.path} is closed. Record into a new folder.")
        self._writer.check()

    # One step: the optimizer's hooks

    def _before_step(self, number: int) -> Callable[..., Any]:
        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._alive()
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
            if closure is None:
                self._update(number)
                return None

            def recorded() -> Any:
                loss = closure()
                self._update(number)
                return loss

            if "closure" in kwargs:
                return args, {**kwargs, "closure": recorded}
            return (args[0], recorded, *args[2:]), kwargs

        return hook

    def _after_step(self, number: int) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._updating = False
            for place, parameter, _ in self._recorded([number]):
                self._watched(place).remember(parameter)

        return hook

    def _update(self, number: int) -> None:
        """An optimizer is about to update its parameters: turn what the ledger holds into a part of a step."""
        moved = self._moved()
        if moved is not None:
            raise UnexplainedError(
                f"step {self._next_step}: {moved} was changed since the last step by something else than its optimizer "
                f"(load_state_dict, .data, an average of weights, a constraint). Its dual form would no longer hold. "
                f"End this recording before such a change and begin a new one after it."
            )
        if self._open is not None and number in self._stepped:
            self._finish_step()
        if self._open is None:
            self._open, self._stepped, self._rows_of = records.Step(self._next_step), set(), {}
            for ledger in self._ledger.layers:
                ledger.stored.clear()
            self._open.log.update(self._early_log)
            self._early_log.clear()
            self._next_step += 1
        self._open.updates.extend(self._updates(number))
        self._stepped.add(number)
        self._updating = True
        self._ledger.pending = False

    def _updates(self, number: int) -> list[records.Update]:
        """The update of each recorded parameter of an optimizer; stores the backward passes that take part."""
        optimizer = self._optimizers[number]
        replay = optimizers.replay_for(optimizer)
        audited: list[tuple[_Place, Tensor, list[Pass], audit.Verdict, dict[str, float]]] = []
        for place, parameter, group in self._recorded([number]):
            if parameter.grad is None:
                continue
            ledger = self._ledger.layers[place.layer]
            passes = [p for p in (*ledger.stored, *ledger.passes) if place.short in p.counted]
            seen = ledger.seen(place.short, parameter.grad)
            verdict = audit.explain([p.link(place.short) for p in passes], seen, roundoff(parameter))
            if not verdict.explained:
                self._unexplained(place, verdict, passes)
            settings = replay.settings(group, optimizer.state.get(parameter, {})) if replay else {}
            audited.append((place, parameter.grad, passes, verdict, settings))
        common = self._common_factor([verdict for *_, verdict, _ in audited])
        factors: list[dict[int, float]] = []
        for _, _, passes, verdict, _ in audited:
            scale = 1.0 if verdict.determined else common
            factors.append({p.task: f * scale for p, f in zip(passes, verdict.factors, strict=True) if f != 0})
        for layer in {place.layer for place, *_ in audited}:
            used = {task for (place, *_), f in zip(audited, factors, strict=True) if place.layer == layer for task in f}
            self._blocks(layer, used)
        kind = replay.kind if replay else type(optimizer).__name__
        updates = []
        for (place, gradient, _, verdict, settings), by_task in zip(audited, factors, strict=True):
            kept = gradient.detach().cpu().clone() if place.short == "bias" and self._keep == "slots" else None
            row = [by_task.get(p.task, 0.0) for p in self._ledger.layers[place.layer].stored]
            updates.append(records.Update(place.number, kind, settings, row, verdict.residual, kept))
        return updates

    def _blocks(self, layer: int, tasks: set[int]) -> None:
        """Store the slots of those backward passes of a layer that take part in an update; forget the others."""
        assert self._open is not None
        ledger = self._ledger.layers[layer]
        for entry in ledger.passes:
            if entry.task not in tasks:
                continue
            if entry.problem is not None:
                raise entry.problem
            for call, slots in enumerate(sorted(entry.calls, key=lambda c: c.serial)):
                self._open.blocks.append(
                    records.Block(
                        layer,
                        len(ledger.stored),
                        call,
                        self._rows(slots.batch),
                        slots.rows,
                        slots.positions,
                        slots.keys,
                        slots.errors,
                    )
                )
            ledger.stored.append(entry)
        ledger.passes.clear()
        self._ledger.spent.add(layer)

    def _rows(self, batch: Batch) -> int:
        """The number of a batch's first row in this step."""
        assert self._open is not None
        if batch.serial not in self._rows_of:
            self._rows_of[batch.serial] = self._next_row
            self._open.rows.append(records.Rows(self._next_row, batch.rows, batch.values))
            self._next_row += batch.rows
        return self._rows_of[batch.serial]

    def _common_factor(self, verdicts: list[audit.Verdict]) -> float:
        """For gradients that are rounding noise, the factor of the others: clipping scales them all alike."""
        known = [v.factors[-1] for v in verdicts if v.determined and v.factors]
        return statistics.median_low(known) if known else 1.0

    def _unexplained(self, place: _Place, verdict: audit.Verdict, passes: list[Pass]) -> None:
        for entry in passes:
            if entry.problem is not None:
                raise entry.problem
        raise UnexplainedError(
            f"step {self._next_step - 1}: the recorded slots do not explain the gradient of {place.name!r} (residual "
            f"{verdict.residual:.1e} of its size). Likely causes: gradients clipped by value or with noise added, "
            f"gradients not zeroed since an earlier step, the parameter used outside its module (F.linear), or its "
            f"input changed in place. Scaling, clipping by norm and accumulation are understood."
        )

    # The weights themselves

    def _recorded(self, numbers: Iterable[int]) -> Iterator[tuple[_Place, nn.Parameter, dict[str, Any]]]:
        """The recorded parameters of some optimizers, with their groups."""
        for number in numbers:
            for group in self._optimizers[number].param_groups:
                for parameter in group["params"]:
                    place = self._places.get(id(parameter))
                    if place is not None:
                        yield place, parameter, group

    def _watched(self, place: _Place) -> Watched:
        return self._ledger.layers[place.layer].watched[place.short]

    def _moved(self) -> str | None:
        """The name of a parameter that changed since its last update, or None."""
        for place, parameter, _ in self._recorded(range(len(self._optimizers))):
            if self._watched(place).changed(parameter):
                return place.name
        return None

    def _finish_step(self) -> None:
        """Hand the open step to the writer; log() may still have added to it until now."""
        if self._open is None:
            return
        step, self._open = self._open, None
        self._since_snapshot += step.nbytes
        self._writer.put(step, self._columns or ())
        if self._since_snapshot >= max(SNAPSHOT_SHARE * self._snapshot_bytes, SNAPSHOT_CHUNKS * self._chunk_bytes):
            self._writer.snapshot(step.number + 1, self._weights())
            self._since_snapshot = 0

    def _weights(self) -> dict[str, Tensor]:
        """Copies of all weights and buffers, and of the optimizer state of recorded parameters."""
        tensors = {
            f"model.{name}": value.detach().cpu().clone().contiguous()
            for name, value in self._model.state_dict().items()
            if isinstance(value, Tensor)
        }
        for number, optimizer in enumerate(self._optimizers):
            replay = optimizers.replay_for(optimizer)
            for place, parameter, _ in self._recorded([number]) if replay else ():
                for name in replay.state if replay else ():
                    value = optimizer.state.get(parameter, {}).get(name)
                    if isinstance(value, Tensor):
                        tensors[f"state.{place.name}.{name}"] = value.detach().cpu().clone().contiguous()
        return tensors


