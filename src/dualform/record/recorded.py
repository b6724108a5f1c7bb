"""Recorded modules and their layers, with the slots that have arrived since the last update.

A layer has calls, the slots of each backward pass. It may use several parameters, and a parameter may be used by several layers (tied weights).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dualform.errors import DualformError
from dualform.layers.keys import Keys, Maps, Numbers, Vectors
from dualform.layers.rows import Layout
from dualform.layers.slot_source import Errors, LayerSlots
from dualform.layers.streams import Layer, Use
from dualform.native.kernels import is_plain
from dualform.record.columns import Batch
from dualform.record.forward_pass import ForwardPass
from dualform.record.parameters import RecordedParameter, norm_of_rows
from dualform.record.silent import silent_slots
from dualform.record.slot_loop import LoopPlan, Slots
from dualform.store.encoding import Encoded, EncodeRequest, encode_numbers
from dualform.store.memory import Pool
from dualform.store.records import Block

CONSUMED = 64
"""How many backward passes of earlier steps a layer remembers, to say so if one of them is used again."""
HALVES = (torch.float16, torch.bfloat16)
NOTHING = Encoded(torch.empty(0, 0), None)
"""Vectors that are yet to be copied."""


@dataclass(frozen=True)
class StoreAs:
    """What is kept of a slot, and how."""

    dtype: str
    keep: str
    pool: Pool
    errors: bool = True
    """Whether error signals are of use; else those that take a second computation are left out."""

    @property
    def keeps_errors(self) -> bool:
        """Whether error signals are stored."""
        return self.keep != "keys" and self.errors


@dataclass(eq=False, slots=True)
class Visit:
    """One call of a module in a forward pass. It holds no tensors: autograd does, and frees them in time."""

    serial: int
    module: RecordedModule
    batch: Batch | None
    forward: ForwardPass | None
    """The forward pass it was part of; None: it was run again in a backward pass, and no forward pass is known."""
    call: int | None
    """Its number among the calls of its module in that forward pass; None: not known."""
    slots: Callable[[Sequence[Tensor], Errors], list[LayerSlots]]
    """(what was saved for it, the gradients of what came out) → its slots."""
    is_data: bool
    """Whether what came in is data and not the output of other layers: then it may come again."""
    own_problem: DualformError | None

    @property
    def problem(self) -> DualformError | None:
        """Why its slots cannot be named."""
        if self.own_problem is not None or self.forward is None:
            return self.own_problem
        return self.forward.problem


@dataclass(slots=True)
class Call(Block):
    """A visit whose error signals have arrived: its slots, copied with those of other calls. Its place in a step is found later."""

    serial: int = field(kw_only=True)
    batch: Batch = field(kw_only=True)
    is_shared: bool = field(kw_only=True, default=False)
    """Whether its slots serve all rows and belong to none."""


@dataclass(slots=True)
class Arrival:
    """What a backward pass has brought to one visit."""

    visit: Visit
    number: int
    """How many others had arrived before it in the backward pass."""
    errors: Sequence[Tensor | None]
    """The gradients of what came out."""
    saved: Sequence[Tensor]


@dataclass(slots=True)
class CallSlots:
    """Keys and error signals of one call of a layer: a row for each slot, or for each of its feature maps."""

    layer: RecordedLayer
    arrival: Arrival
    layout: Layout
    keys: Tensor
    """As they are stored."""
    errors: Tensor | None
    key_terms: float = 0.0
    """This and the next one: as LayerSlots has them."""
    error_terms: float = 0.0
    positions: int = 0
    """How many slots there are of each row."""
    shape: tuple[int, ...] = ()
    """Of feature maps: how many there are of each row, and their size."""
    loop: Slots | None = None
    """The same for the native loop, if it may take them."""

    def decoded_keys(self) -> Keys:
        """The keys as what they stand for."""
        layer = self.layer.layer
        if layer.geometry is not None:
            maps = self.keys.reshape(-1, layer.geometry.channels, *self.shape[1:])
            return Maps(maps, layer.geometry)
        if layer.form == "numbers":
            assert self.errors is not None
            return Numbers(self.keys, layer.d_in, self.errors.dtype)
        return Vectors(self.keys)


class RecordedLayer:
    """The slots of one layer since its last update."""

    def __init__(self, number: int, layer: Layer, parameters: dict[str, RecordedParameter], store_as: StoreAs):
        self.number, self.layer, self._store_as = number, layer, store_as
        self.uses = [(use, parameters[use.parameter]) for use in layer.uses]
        self.calls: dict[int, list[Call]] = {}
        """By backward pass."""
        self.problems: dict[int, DualformError] = {}
        self.consumed: deque[int] = deque(maxlen=CONSUMED)
        """The last ones that earlier steps have stored."""
        self._keys_may_repeat = layer.form == "vectors" and layer.kind == "linear"
        self._key_name, self._error_name = f"{layer.name}.key", f"{layer.name}.error"
        weight = self.uses[0][1]
        ordinary = [Use(use.parameter, role) for use, role in zip(layer.uses, ("weight", "bias"), strict=False)]
        like_linear = list(layer.uses) == ordinary and layer.form == "vectors" and not layer.outputs
        self.plan: LoopPlan | None = None
        """How its slots are taken by the compiled loop, if they can be."""
        if like_linear and is_plain(weight.random.T) and weight.random.numel():
            bias = self.uses[1][1] if len(self.uses) > 1 else None
            self.plan = LoopPlan(weight, bias, self._key_name, self._error_name, store_as.keeps_errors)

    def read(self, task: int, arrival: Arrival, found: LayerSlots, layout: Layout) -> CallSlots:
        """What has arrived at one call, a row for each slot."""
        keys = found.keys.detach()
        if found.errors is None:
            return CallSlots(self, arrival, layout, layout.slots(keys), None, positions=layout.positions)
        errors = found.errors.detach()
        if errors.dtype in HALVES:
            self._note_autocast(task, found)
            own_type = self.uses[0][1].tensor.dtype
            # The gradient is made of the input as it was cast; but a part is a product already
            if keys.is_floating_point() and self.layer.form != "parts":
                keys = keys.to(errors.dtype).to(own_type)
            errors = errors.to(own_type)
        call = CallSlots(self, arrival, layout, keys, errors, found.key_terms, found.error_terms)
        if self.layer.geometry is not None:
            size = tuple(keys.shape[2:])
            call.positions = layout.positions * math.prod(self.layer.geometry.positions(size))
            call.shape = (layout.positions, *size)
            call.keys = layout.slots(keys.flatten(1))
            call.errors = layout.slots(errors.flatten(1)).reshape(-1, errors.shape[-1])
            return call
        call.positions = layout.positions
        call.keys = layout.slots(keys)
        call.errors = errors = layout.slots(errors)
        if self.plan is not None:
            call.loop = Slots(call.keys, errors, self.plan, self.may_repeat(arrival.visit))
        return call

    def _note_autocast(self, task: int, found: LayerSlots) -> None:
        """The gradients of this pass are rounded to 16 bits."""
        errors = found.errors
        assert errors is not None
        # Some convolutions round what each image adds
        partial_sums = found.partial_sums if self.layer.geometry is None else len(errors)
        for _, parameter in self.uses:
            share = parameter.share(task)
            share.coarse_dtype = errors.dtype
            share.partial_sums += partial_sums
            share.rounded_inside |= found.rounded_inside

    def add(self, task: int, slots: CallSlots) -> list[tuple[Call, str, EncodeRequest]]:
        """Add what one call has to say on the gradients. Gives what is yet to be copied: vectors, and the field of the call they go to."""
        call = self._new_call(task, slots)
        errors = slots.errors
        if errors is None:
            for _, parameter in self.uses:
                parameter.share(task).audited = False
            return self._keys_to_copy(call, slots.keys)
        norms = torch.linalg.vector_norm(errors, dim=1)
        call.silent = silent_slots(errors)
        if call.silent is not None and self.layer.form == "parts":
            # A normalisation sums the error signals of several positions: they may cancel while the weight's part does not
            call.silent &= ~slots.keys.any(1).cpu().numpy()
        size_of_errors = max(norm_of_rows(norms, errors), slots.error_terms)
        keys = slots.decoded_keys()
        for use, parameter in self.uses:
            if parameter.tensor.requires_grad:
                parameter.add(task, use, keys, errors, size_of_errors, slots.key_terms)
        to_copy = self._keys_to_copy(call, slots.keys)
        if self._store_as.keeps_errors and self.layer.outputs:
            to_copy.append((call, "errors", EncodeRequest(errors[:, list(self.layer.outputs)], self._error_name, None)))
        elif self._store_as.keeps_errors:
            to_copy.append((call, "errors", EncodeRequest(errors, self._error_name, norms)))
        return to_copy

    def _keys_to_copy(self, call: Call, keys: Tensor) -> list[tuple[Call, str, EncodeRequest]]:
        if self.layer.form == "numbers":
            call.keys = encode_numbers(keys)
            return []
        return [(call, "keys", EncodeRequest(keys, self._key_name, as_they_are=True))]

    def add_from_loop(self, task: int, slots: CallSlots) -> None:
        """The same for slots that the native loop has copied, of something like nn.Linear: its weight, and its bias if it has one."""
        taken = slots.loop
        assert taken is not None
        assert taken.key_copy is not None
        call = self._new_call(task, slots)
        call.keys = taken.key_copy
        call.errors = taken.error_copy
        call.silent = taken.silent
        for parameter, added, scale in taken.added(slots.error_terms):
            if parameter.tensor.requires_grad:
                parameter.share(task).add(added, scale)

    def may_repeat(self, visit: Visit) -> bool:
        """Whether keys of a visit may come again."""
        return self._keys_may_repeat and visit.is_data

    def _new_call(self, task: int, slots: CallSlots) -> Call:
        visit = slots.arrival.visit
        assert visit.batch is not None
        call = Call(
            layer=self.number,
            backward=0,
            call=0,
            first_row=0,
            rows=slots.layout.rows,
            positions=slots.positions,
            keys=NOTHING,
            errors=None,
            may_repeat=self.may_repeat(visit),
            shape=slots.shape,
            arrival=slots.arrival.number,
            serial=visit.serial,
            batch=visit.batch,
            is_shared=slots.layout.is_shared,
        )
        self.calls.setdefault(task, []).append(call)
        return call

    def tasks(self) -> set[int]:
        """The backward passes that anything is known of."""
        return {*self.calls, *self.problems}

    def forget(self, tasks: set[int]) -> None:
        """Forget the slots of some backward passes."""
        for task in tasks:
            self.calls.pop(task, None)
            self.problems.pop(task, None)


class RecordedModule:
    """One module, with the layers that it has."""

    def __init__(self, name: str, module: nn.Module, layers: list[RecordedLayer]):
        self.name, self.module, self.layers = name, module, layers
        self.by_name = {layer.layer.name: layer for layer in layers}
        self.parameters = list({id(p): p for layer in layers for _, p in layer.uses}.values())
        self.called = False
        self.has_hooked_parameters = False
        """Whether all its parameters have hooks."""

    def pending(self) -> bool:
        """Whether anything has arrived since its last update."""
        for parameter in self.parameters:
            if parameter.shares:
                return True
        for layer in self.layers:  # noqa: SIM110 (at every call: no generator)
            if layer.calls or layer.problems:
                return True
        return False

    def counted_in(self, task: int) -> bool:
        """Whether a backward pass has reached its parameters: then all gradients of what came out have arrived."""
        for parameter in self.parameters:
            for share in parameter.shares:
                if share.counted and share.task == task:
                    return True
        return False
