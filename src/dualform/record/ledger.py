"""The ledger: what was captured since the last step, layer by layer, until an optimizer turns it into an update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from dualform.errors import BatchError, DualformError
from dualform.layers import axes
from dualform.record import audit
from dualform.record.choose import Chosen
from dualform.record.columns import Batch
from dualform.store.encoding import Encoded, Pool, encode


@dataclass(frozen=True)
class StoreAs:
    """What is kept of a slot, and how."""

    dtype: str
    keep: str
    pool: Pool


@dataclass(frozen=True)
class Visit:
    """One call of a layer in a forward pass."""

    serial: int
    batch: Batch | None
    key: Tensor
    problem: DualformError | None


@dataclass(frozen=True)
class Call:
    """A visit whose error signal has arrived: slots, copied."""

    serial: int
    batch: Batch
    rows: int
    positions: int
    keys: Encoded
    errors: Encoded | None
    may_repeat: bool


@dataclass
class Pass:
    """One backward pass through one layer."""

    task: int
    before: dict[str, audit.Seen | None]
    added: dict[str, audit.Seen]
    scale: dict[str, float]
    calls: list[Call] = field(default_factory=list)
    counted: set[str] = field(default_factory=set)
    problem: DualformError | None = None

    def link(self, name: str) -> audit.Link:
        """What the audit of a parameter needs to know."""
        return audit.Link(self.before[name], self.added[name], self.scale[name])


PARTS = 8
"""Between steps, one part in so many of a weight is looked at, another one each time."""


THROWN = 8
"""How many backward passes are kept after their gradients were thrown away."""


class Watched:
    """What a parameter looked like after its last update: has anything else changed it since?

    Changes that PyTorch counts (`_version`) are always looked into. Edits through .data leave no such trace: of a weight, an
    eighth of the rows is compared each time, so an edit of the whole weight never passes; a bias every eighth time.
    """

    def __init__(self, ledger: LayerLedger, name: str, parameter: Tensor):
        self._ledger, self._name, self._turn = ledger, name, 0
        self._part = max(1, -(-parameter.shape[0] // PARTS))
        # A weight of few rows has fewer parts: none of them may be empty
        self._turns = PARTS if name == "bias" else max(1, -(-parameter.shape[0] // self._part))
        self._slack = audit.SLACK * roundoff(parameter) * math.sqrt(parameter.shape[-1])
        self.remember(parameter)

    def remember(self, parameter: Tensor) -> None:
        """The parameter has just been updated."""
        self._seen = self._ledger.seen(self._name, parameter)
        self._mark = (parameter._version, parameter.data_ptr())

    @property
    def fingerprint(self) -> float:
        """One number that tells what was remembered: r · (W R)."""
        return float(self._ledger.mixed[: self._seen.size] @ self._seen)

    @property
    def size(self) -> float:
        """About how large the fingerprint can be: the norm of what was remembered."""
        return _norm(self._seen)

    def changed(self, parameter: Tensor) -> bool:
        """Whether it is no longer what it was."""
        known, part = self._seen, parameter.detach()
        if self._mark == (parameter._version, parameter.data_ptr()):
            self._turn = (self._turn + 1) % self._turns
            if self._name == "bias":
                if self._turn:
                    return False
            else:
                low, high = self._turn * self._part, (self._turn + 1) * self._part
                columns = self._ledger.columns
                known, part = known[low * columns : high * columns], part[low:high]
        now = self._ledger.seen(self._name, part)
        # The same product over fewer rows may round otherwise; the entries of R are ±1, so |known| tells the size
        if _norm(now - known) <= self._slack * _norm(known):
            return False
        return not np.array_equal(now, known, equal_nan=True)


def roundoff(tensor: Tensor) -> float:
    """The unit roundoff of a tensor's type."""
    return torch.finfo(tensor.dtype).eps / 2


class LayerLedger:
    """The backward passes of one layer since its last update."""

    def __init__(self, layer: Chosen, seed: int):
        self.layer = layer
        self.module = layer.module
        generator = torch.Generator().manual_seed(seed ^ xxhash.xxh3_64_intdigest(layer.name.encode()) >> 2)
        weight = self.parameters()["weight"]
        self.d_out, self.d_in = weight.shape
        self.random = audit.random_columns(self.d_in, self.d_out, weight.dtype, generator)
        self.columns = self.random.shape[1]
        self.mixed = np.random.default_rng(generator.initial_seed()).standard_normal(self.d_out * self.columns)
        self.watched = {name: Watched(self, name, p) for name, p in self.parameters().items()}
        self.called = False
        self.passes: list[Pass] = []
        self.stored: list[Pass] = []
        """Those that the open step has stored already: weight and bias may belong to different optimizers."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """The layer's parameters by their short name."""
        return {n: p for n in ("weight", "bias") if (p := getattr(self.module, n)) is not None}

    def seen(self, name: str, tensor: Tensor) -> audit.Seen:
        """A parameter-shaped tensor as the audit sees it; a copy."""
        tensor = tensor.detach()
        if name == "weight":
            tensor = tensor @ self._random_like(tensor)
        seen: audit.Seen = tensor.cpu().numpy().astype(np.float64).ravel()
        return seen

    def _random_like(self, tensor: Tensor) -> Tensor:
        random = self.random
        if tensor.dtype is not random.dtype or tensor.device != random.device:
            random = random.to(tensor.device, tensor.dtype)
        return random

    def current(self, task: int) -> Pass:
        """The pass of a graph task: begun at its first error signal, before anything is added to .grad."""
        for entry in reversed(self.passes):
            if entry.task == task:
                return entry
        gradients = {name: p.grad for name, p in self.parameters().items()}
        if all(g is None for g in gradients.values()):
            del self.passes[:-THROWN]  # thrown away, as it seems; gradients put aside may still come back
        entry = Pass(
            task,
            before={name: None if g is None else self.seen(name, g) for name, g in gradients.items()},
            added={name: np.zeros(self.d_out * (self.columns if name == "weight" else 1)) for name in gradients},
            scale=dict.fromkeys(gradients, 0.0),
        )
        self.passes.append(entry)
        return entry

    def add(self, entry: Pass, visit: Visit, error: Tensor, layout: axes.Layout, store_as: StoreAs) -> None:
        """Add the slots of one call to a pass."""
        assert visit.batch is not None
        keys, errors = layout.slots(visit.key.detach()), layout.slots(error.detach())
        projected = keys @ self._random_like(keys)
        norms = torch.linalg.vector_norm(errors, dim=1).cpu().numpy()
        size = _norm(norms)
        entry.added["weight"] += (errors.T @ projected).cpu().numpy().ravel()
        entry.scale["weight"] += size * _norm(projected.cpu().numpy().ravel())
        if "bias" in entry.added:
            entry.added["bias"] += errors.sum(0).cpu().numpy()
            entry.scale["bias"] += size * math.sqrt(len(errors))
        entry.calls.append(
            Call(
                visit.serial,
                visit.batch,
                layout.rows,
                layout.positions,
                encode(keys, store_as.dtype, store_as.pool, f"{self.layer.name}.key"),
                encode(errors, store_as.dtype, store_as.pool, f"{self.layer.name}.error", norms)
                if store_as.keep != "keys"
                else None,
                not visit.key.requires_grad,
            )
        )


def _norm(flat: np.ndarray[Any, Any]) -> float:
    return math.sqrt(float(flat @ flat))


class Ledger:
    """Listens to the hooks. Problems are kept with the pass they concern and raised only if that pass counts."""

    def __init__(self, *, store_as: StoreAs, batch_axis: dict[str, int], seed: int):
        self.layers: list[LayerLedger] = []
        self.seed = seed
        """The recording's private random seed; each layer's R is drawn from it and the layer's name."""
        self.batch: Batch | None = None
        self.spent: set[int] = set()
        """Layers whose update has happened since the last batch() call: new slots there have no rows."""
        self.calls_since_backward = 0
        """How many batch() calls there were since the last backward pass."""
        self.pending = False
        """Whether gradients have arrived since the last update."""
        self.store_as, self._batch_axis = store_as, batch_axis
        self._serial = 0

    def add_layer(self, layer: Chosen) -> int:
        """Enter a layer; gives its number."""
        return self.adopt(LayerLedger(layer, self.seed))

    def adopt(self, ledger: LayerLedger) -> int:
        """Enter a layer that has a ledger already; gives its number."""
        self.layers.append(ledger)
        return len(self.layers) - 1

    def begin(self, batch: Batch) -> None:
        """A new batch() call."""
        self.batch = batch
        self.spent.clear()
        self.calls_since_backward += 1

    def forward(self, layer: int, arguments: tuple[tuple[Any, ...], dict[str, Any]], task: int) -> Visit:
        """A layer is called with gradients on."""
        entry = self.layers[layer]
        entry.called = True
        key = entry.layer.rule.key(arguments)
        problem: DualformError | None = None
        if task < 0:
            entry.passes = [p for p in entry.passes if p.counted]  # autograd.grad: never reached the parameter
        elif self.calls_since_backward > 1:
            problem = BatchError(
                f"layer {entry.layer.name!r} was run again during a backward pass (activation checkpointing) after "
                f"{self.calls_since_backward} batch() calls, so its rows could be of any of them. Call batch(), forward "
                f"and backward in turn for each microbatch, or use checkpoint(…, use_reentrant=False)."
            )
        if self.batch is None:
            problem = BatchError(
                "no recorder.batch() call before this step. Call recorder.batch(sample_id=…, …) with one entry per "
                "row before each forward pass that is trained on."
            )
        elif layer in self.spent:
            problem = BatchError(
                f"layer {entry.layer.name!r} was trained on again without a new recorder.batch() call since its last "
                f"update. Call recorder.batch() before each forward pass, so that its slots get the right rows."
            )
        elif key.dim() == 2 and (axis := axes.flattened_from(key, self.batch.rows)) is not None:
            self.batch.flattened[len(key)] = axis
        self._serial += 1
        return Visit(self._serial, self.batch, key, problem)

    def backward(self, layer: int, visit: Visit, error: Tensor, task: int) -> None:
        """An error signal arrives."""
        self.calls_since_backward = 0
        ledger = self.layers[layer]
        entry = ledger.current(task)
        if visit.problem is not None or visit.batch is None:
            entry.problem = visit.problem
            return
        try:
            layout = self._layout(ledger, visit)
        except DualformError as problem:
            entry.problem = problem
            return
        ledger.add(entry, visit, error, layout, self.store_as)

    def counted(self, layer: int, parameter: str, task: int) -> None:
        """A parameter's .grad has been added to: the slots of this pass count for it."""
        self.pending = True
        self.layers[layer].current(task).counted.add(parameter)

    def _layout(self, ledger: LayerLedger, visit: Visit) -> axes.Layout:
        assert visit.batch is not None
        name, rows, lead = ledger.layer.name, visit.batch.rows, tuple(visit.key.shape[:-1])
        told, known = self._batch_axis.get(name), visit.batch.flattened.get(lead[0]) if len(lead) == 1 else None
        return axes.layout(lead, rows, layer=name, axis=told, evidence=() if known is None else (known,))
