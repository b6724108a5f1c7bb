"""Layers whose parameters are added to an optimizer during training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from dualform.record.choose import ChosenModule
from dualform.record.manifest import parameter_entries
from dualform.record.parameters import RecordedParameter
from dualform.record.passes import PendingPasses
from dualform.record.recorded import RecordedModule
from dualform.store.writer import Writer

TOO_LATE = "changed before a forward pass found it in an optimizer (call add_param_group before the forward pass, not between it and the step)"


class LateLayers:
    """Modules that were left out because no optimizer had their parameters."""

    def __init__(
        self, waiting: Sequence[ChosenModule], optimizers: Sequence[Optimizer], passes: PendingPasses, writer: Writer
    ):
        self._optimizers = optimizers
        self._passes = passes
        self._writer = writer
        self._waiting = list(waiting)
        self._parameters = {
            one.name: [
                RecordedParameter(-1, name, tensor, passes.seed, vector=tensor.dim() < 2)
                for name, tensor in one.parameters.items()
            ]
            for one in waiting
        }
        """By module: what its parameters were when recording began."""
        self._optimized = self._count_optimized()

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, *, with_totals: bool) -> list[RecordedModule]:
        """Before a forward pass: enter those that add_param_group has brought in since the last one."""
        if not self._waiting or self._count_optimized() == self._optimized:
            return []
        self._optimized = self._count_optimized()
        optimized = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        entered = []
        for one in list(self._waiting):
            if not any(id(tensor) in optimized for tensor in one.parameters.values()):
                continue
            self._waiting.remove(one)
            why_left_out = self._why_left_out(one, with_totals)
            if why_left_out is not None:
                warnings.warn(f"not recorded: {one.name!r}: it {why_left_out}", stacklevel=4)
            else:
                entered.append(self._enter(one))
        return entered

    def _why_left_out(self, one: ChosenModule, with_totals: bool) -> str | None:
        if any(parameter.changed() for parameter in self._parameters[one.name]):
            return TOO_LATE
        return "entered an optimizer too late for totals" if with_totals else None

    def _enter(self, late: ChosenModule) -> RecordedModule:
        known = len(self._passes.parameters)
        module = self._passes.enter(late.name, late.module, late.layers, late.parameters)
        new = list(self._passes.parameters.values())[known:]
        self._writer.add_layers(late.name, [layer.stored for layer in module.layers], parameter_entries(new))
        return module

    def _count_optimized(self) -> int:
        return sum(len(group["params"]) for one in self._optimizers for group in one.param_groups)
