"""What happens to finished steps: they are added to totals and curvature and given to the writer, with snapshots of the weights.

All of this can be done again for a step, after an exception has interrupted it, without being counted twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dualform.errors import RecordingError
from dualform.record.curvature import OnlineCurvature
from dualform.record.disk_space import DiskSpace
from dualform.record.fixed_weights import are_weights_fixed
from dualform.record.frozen import base_of, frozen, is_part_of
from dualform.record.interrupts import INTERRUPTS
from dualform.record.passes import PendingPasses
from dualform.record.steps import StepBuilder
from dualform.record.totals import OnlineTotals
from dualform.store import format as store
from dualform.store import records
from dualform.store.tensors import tensor_checksum
from dualform.store.writer import Writer

SNAPSHOT_SHARE = 8
"""Snapshots are taken when the slots since the last one take this many times its size: at most 1/8 more disk."""
STRETCH_BYTES = 32 << 20
"""How many bytes of slots are folded into totals at a time."""
SNAPSHOT_CHUNKS = 4
"""… and not before this many chunks' worth."""
SHARE_IF_NOT_REBUILT = 2
"""Where weights cannot be rebuilt from slots, influence takes them from snapshots: they are taken more often, at most 1/2 more disk, …"""
STEPS_APART = 32
"""… and not before so many steps: each snapshot seals a chunk."""


NOTHING: Mapping[str, str] = MappingProxyType({})


def snapshot_of(model: nn.Module, steps: StepBuilder, stored: Mapping[str, str] = NOTHING) -> dict[str, Tensor]:
    """Copies of all weights and buffers, and of the optimizer state of recorded parameters.

    stored: checksums of frozen weights that an earlier snapshot holds: they are left out as long as nobody has changed them.
    """
    skipped = set(base_of(model, steps.optimizers, steps.recorded))
    for name, checksum in frozen_checksums(model, steps).items():
        if stored.get(name) == checksum:
            skipped.add(name)
    tensors = {
        f"model.{name}": _copied(value)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
        and not nn.parameter.is_lazy(value)
        and not value.is_complex()
        and not is_part_of(name, skipped)
    }
    for watched in steps.watch.parameters():
        prefix = f"state.{watched.parameter.name}"
        for name, value in watched.tensors.items():
            tensors[f"{prefix}.{name}"] = _copied(value)
        for name, number in watched.counters.items():
            tensors[f"{prefix}.{name}"] = torch.tensor([number], dtype=torch.float64)
    return tensors


def frozen_checksums(model: nn.Module, steps: StepBuilder) -> dict[str, str]:
    """Of each frozen weight that is stored: a momentum encoder is frozen, too, and changed by hand."""
    found = frozen(model, steps.optimizers, steps.recorded)
    base = base_of(model, steps.optimizers, steps.recorded)
    return {name: tensor_checksum(parameter) for name, parameter in found.items() if name not in base}


def _copied(value: Tensor) -> Tensor:
    """A copy in a type that can be stored: 16 and 8 bits that NumPy does not know become float32, exactly."""
    value = value.detach().cpu()
    known = value.dtype in (torch.float16, torch.float32, torch.float64) or not value.is_floating_point()
    return (value.clone() if known else value.float()).contiguous()


class FinishedSteps:
    """Stores finished steps, and snapshots between them."""

    def __init__(
        self,
        model: nn.Module,
        writer: Writer,
        passes: PendingPasses,
        steps: StepBuilder,
        totals: OnlineTotals | None,
        curvature: OnlineCurvature | None,
        chunk_bytes: int,
    ):
        self._model = model
        self._writer = writer
        self._passes = passes
        self._steps = steps
        self._chunk_bytes = chunk_bytes
        self.totals = totals
        self.curvature = curvature
        self.columns: tuple[store.Column, ...] | None = writer.manifest.columns or None
        self.is_closing = False
        """Whether the training is over."""
        self.problem: Exception | None = None
        """Why steps could be stored at the end only without their part in totals and curvature."""
        self.has_given_up_totals = False
        self._totals_lent = False
        """Whether the writer may be writing the totals, which are not copied for it."""
        self.is_checkpointed = self.keeps_only_totals and writer.manifest.end_step > 0
        """Totals alone are those of one step. Once a checkpoint stands beside them, nothing but seal() and the end takes it away."""
        self.disk_space: DiskSpace | None = None
        """Watches the disk, if it fills with the steps."""
        self._since_snapshot = 0
        self._steps_since_snapshot = 0
        self.exchange = steps.exchange
        if self.exchange is not None:
            self.exchange.wants_snapshot = self._is_snapshot_wanted
        # A resumed recording begins with a snapshot of everything
        self._stored_frozen = {} if writer.manifest.end_step else frozen_checksums(model, steps)
        first = snapshot_of(model, steps, self._stored_frozen)
        self._snapshot_bytes = sum(tensor.nbytes for tensor in first.values())

    @property
    def has_fixed_weights(self) -> bool:
        """Whether nothing is trained: the weights of each checkpoint are stored once, when it begins."""
        return are_weights_fixed(self._steps.optimizers)

    @property
    def keeps_only_totals(self) -> bool:
        """Whether no slots are stored."""
        return self._writer.manifest.keep == "totals"

    def put(self, step: records.Step) -> None:
        """Give a step to totals, curvature and writer."""
        if not self._writer.manifest.keeps_step(step.number):
            step.drop_blocks(self._passes.store_as.pool)
        nbytes = step.nbytes
        if self.curvature is not None:
            with INTERRUPTS.held((self, "curvature")):
                self.curvature.add(step, [layer.stored for layer in self._passes.layers])
        if self.totals is not None and not self.totals.is_whole:
            self._go_on_without_totals()
        if self.totals is None:
            self._writer.put(step, self.columns or ())
            if self.exchange is not None and self.exchange.has_put(nbytes):
                self._writer.seal()
        else:
            with INTERRUPTS.held((self, "totals")):
                self.totals.add(step)
            if self.totals.nbytes >= STRETCH_BYTES:
                self.fold()
        self._since_snapshot += nbytes
        self._steps_since_snapshot += 1
        if self.disk_space is not None:
            self.disk_space.add(step.number, nbytes)

    def put_without_extras(self, error: Exception) -> None:
        """Totals or curvature have failed at the end. Slots depend on neither."""
        self.problem = error
        self.curvature = None
        self._give_up_totals()

    def fold(self) -> None:
        """Fold steps into the totals, and give them to the writer."""
        totals = self.totals
        if totals is None:
            return
        if self._totals_lent:
            self._writer.wait()
            self._totals_lent = False
        with INTERRUPTS.held((self, "totals")):
            totals.fold()
        for step in totals.folded:
            if self.keeps_only_totals:
                step.drop_slots(self._passes.store_as.pool)
            self._writer.put(step, self.columns or ())
        totals.folded = []

    def _go_on_without_totals(self) -> None:
        """An exception has left the totals half-way."""
        message = f"an exception came while the totals of {self._writer.location} were summed up, so they cannot be carried on"
        if self.keeps_only_totals:
            raise RecordingError(
                f"{message}. The store ends with step {self._writer.manifest.end_step}: go on from there with record(…, resume=True)."
            )
        if self.is_closing:
            raise RecordingError(f"{message}. Build them from the slots: dualform.build_totals(path, by).")
        self._give_up_totals()
        warnings.warn(
            f"{message}. Build them from the slots when the recording is closed: dualform.build_totals(path, by).",
            stacklevel=6,
        )

    def _give_up_totals(self) -> None:
        """Keep what was collected for them all the same."""
        totals = self.totals
        if totals is not None:
            for step in (*totals.folded, *totals.collected):
                self._writer.put(step, self.columns or ())
            self.has_given_up_totals = True
            self.totals = None

    # Snapshots

    @property
    def is_snapshot_due(self) -> bool:
        """Whether it is time for one: for all ranks at the same step, if there are several."""
        return self._is_snapshot_wanted() if self.exchange is None else self.exchange.stores_snapshot

    def _is_snapshot_wanted(self) -> bool:
        """Whether enough was stored since the last one."""
        manifest = self._writer.manifest
        if manifest.keeps_gradients or manifest.keep in ("keys", "totals"):
            enough = max(SNAPSHOT_SHARE * self._snapshot_bytes, SNAPSHOT_CHUNKS * self._chunk_bytes)
        else:
            enough = SHARE_IF_NOT_REBUILT * self._snapshot_bytes
            if self._steps_since_snapshot < STEPS_APART:
                return False
        return self._since_snapshot >= enough and not self.is_checkpointed and not self.has_fixed_weights

    def put_snapshot(self, end_step: int, next_row: int) -> None:
        """Hand over the weights, which must be those of the last step, and the totals."""
        if self.keeps_only_totals and self.totals is None:
            return  # weights without totals would be of no use
        weights = snapshot_of(self._model, self._steps, self._stored_frozen)
        self._stored_frozen = frozen_checksums(self._model, self._steps)
        if self.curvature is not None:
            weights |= self.curvature.tensors()
        self._snapshot_bytes = sum(tensor.nbytes for tensor in weights.values())
        if not self.put_totals(weights, end_step, next_row):
            self._writer.snapshot(end_step, weights)
        if self.curvature is not None:
            self.curvature.clear()
        self._since_snapshot = 0
        self._steps_since_snapshot = 0

    def put_totals(self, weights: dict[str, Tensor] | None, end_step: int, next_row: int) -> bool:
        """Pass the totals to the writer, with the weights after the same step if they are known. Returns False if there are no totals."""
        self.fold()
        if self.totals is None or self.columns is None or not end_step:
            return False
        if weights is None and self.keeps_only_totals:
            return False  # what is there, of an earlier step, has its weights
        sealed = self.totals.sealed(end_step, next_row, self.columns)
        self._snapshot_bytes += sealed.nbytes
        # They may take half of the memory, so they are written as they are, without a copy
        self._totals_lent = True
        self._writer.totals(sealed, weights)
        self._writer.wait()
        self._totals_lent = False
        return True
