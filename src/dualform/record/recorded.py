"""Recorded modules and their layers, with the slots that have arrived since the last update.

A layer has calls, the slots of each backward pass. It may use several parameters, and a parameter may be used by several layers (tied weights).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dualform.arrays import Bools
from dualform.errors import DualformError
from dualform.layers.keys import Keys, OneHot, Patches, Vectors, keys_of
from dualform.layers.layer import Layer
from dualform.layers.projected import DEFAULT_SIZE, layer_seed, projected_layer
from dualform.layers.rows import Layout
from dualform.layers.slot_source import Errors, LayerSlots
from dualform.projection import norm_of_tensor, wide_enough
from dualform.record.columns import Batch
from dualform.record.curvature import counted
from dualform.record.forward_pass import ForwardPass
from dualform.record.keep import Keep, keep_of, sums_rows
from dualform.record.parameters import RecordedParameter, norm_of_rows
from dualform.record.row_gradients import SlotsOfCall, projected, summed
from dualform.store.encoding import Encoded, EncodeRequest, encode_numbers
from dualform.store.format import MIXED, SUMMED
from dualform.store.memory import Pool
from dualform.store.records import Block

CONSUMED = 64
"""How many backward passes of earlier steps a layer remembers, to say so if one of them is used again."""
COARSE_TYPES = (torch.float16, torch.bfloat16)
"""The types of autocast."""
NOTHING = Encoded(torch.empty(0, 0), None)
"""Vectors that are yet to be copied."""


@dataclass(frozen=True)
class StoreAs:
    """What is kept of a slot, and how."""

    dtype: str
    keep: Keep
    """As the user said it: for all layers, or by names and globs."""
    pool: Pool
    errors: bool = True
    """Whether error signals are of use; else those that take a second computation are left out."""
    curvature_every: int = 0
    """In one step of so many, the curvature of slots that are summed is counted; 0: in none."""

    projection: int = DEFAULT_SIZE
    """How many numbers keep="projected" leaves of a key and of an error signal."""
    every: int = 1
    """n: the slots of one step in n are kept."""

    @property
    def one_keep(self) -> str:
        """What is kept of all layers, or that it differs."""
        kinds = {self.keep} if isinstance(self.keep, str) else set(self.keep.values())
        return kinds.pop() if len(kinds) == 1 else MIXED

    @property
    def sums_rows(self) -> bool:
        """Whether any layer sums the slots of a row where that takes less."""
        return sums_rows(self.keep)

    def stored(self, layer: Layer, seed: int) -> Layer:
        """A layer as the store has it. seed: the recording's."""
        keep = keep_of(layer.name, self.keep)
        kept = replace(layer, keep=keep)
        return projected_layer(kept, self.projection, layer_seed(seed, layer.name)) if keep == "projected" else kept


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

    def source(self) -> Hashable | None:
        """What tells calls that have the same keys, such as the query, key and value projections of an attention; None: it is not known."""
        if self.layer.layer.form != "vectors" or len(self.arrival.saved) != 1:
            return None
        saved = self.arrival.saved[0]  # autograd keeps it as it was until the backward pass has ended
        memory = (saved.device, saved.dtype, saved.data_ptr(), saved.shape, saved.stride())
        return (*memory, self.keys.dtype, self.keys.shape, self.layout, id(self.arrival.visit.batch))

    def decoded_keys(self) -> Keys:
        """The keys as what they stand for."""
        assert self.errors is not None
        return keys_of(self.layer.layer, self.keys, self.shape[1:], self.errors.dtype)


class RecordedLayer:
    """The slots of one layer since its last update."""

    def __init__(
        self, number: int, layer: Layer, parameters: dict[str, RecordedParameter], store_as: StoreAs, seed: int = 0
    ):
        self.number, self.layer, self._store_as = number, layer, store_as
        self.stored = store_as.stored(layer, seed)
        """As the store has it: the slots of a projected layer are shorter."""
        self.uses = [(use, parameters[use.parameter]) for use in layer.uses]
        self.calls: dict[int, list[Call]] = {}
        """By backward pass."""
        self.problems: dict[int, DualformError] = {}
        self.consumed: deque[int] = deque(maxlen=CONSUMED)
        """The last ones that earlier steps have stored."""
        self._keys_may_repeat = layer.form == "vectors" and layer.kind == "linear"
        self._key_name, self._error_name = f"{layer.name}.key", f"{layer.name}.error"

    def read(self, task: int, arrival: Arrival, found: LayerSlots, layout: Layout) -> CallSlots:
        """What has arrived at one call, a row for each slot."""
        keys = found.keys.detach()
        if found.errors is None:
            return CallSlots(self, arrival, layout, layout.slots(keys), None, positions=layout.positions)
        errors = found.errors.detach()
        if errors.dtype in COARSE_TYPES:
            self._note_autocast(task, found)
            own_type = wide_enough(self.uses[0][1].tensor.dtype)
            if keys.is_floating_point():
                # The gradient is made of the input as it was cast; but a part is a product already
                cast = keys if self.layer.form == "parts" else keys.to(errors.dtype)
                keys = cast.to(own_type)
            errors = errors.to(own_type)
        call = CallSlots(self, arrival, layout, keys, errors, found.key_terms, found.error_terms)
        if self.layer.geometry is not None:
            size = tuple(keys.shape[2:])
            call.positions = layout.positions * math.prod(self.layer.geometry.positions(size))
            call.shape = (layout.positions, *size)
            call.keys = layout.slots(keys.flatten(1))
            # Made contiguous first: flatten() of the transposed maps copies them several times as slowly
            call.errors = layout.slots(errors.contiguous().flatten(1)).reshape(-1, errors.shape[-1])
            return call
        call.positions = layout.positions
        call.keys = layout.slots(keys)
        call.errors = layout.slots(errors)
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
            return self._keys_to_copy(call, slots.keys, source=slots.source())
        error_norms = torch.linalg.vector_norm(errors, dim=1)
        call.silent = silent_slots(errors, error_norms)
        if call.silent is not None and self.layer.form == "parts":
            # A normalisation sums the error signals of several positions: they may cancel while the weight's part does not
            call.silent &= ~slots.keys.any(1).cpu().numpy()
        keys = slots.decoded_keys()
        key_norms = torch.linalg.vector_norm(slots.keys, dim=1) if isinstance(keys, Vectors) else None
        error_size = max(norm_of_rows(error_norms, errors), slots.error_terms)
        key_size = max(_size_of_keys(keys, key_norms), slots.key_terms)
        for use, parameter in self.uses:
            if parameter.tensor.requires_grad:
                parameter.add(task, use, keys, errors, error_size, key_size)
        if self.stored.keep in SUMMED:
            in_place_of_slots = self._summed(call, slots, keys, errors)
            if in_place_of_slots is not None:
                return in_place_of_slots
        to_copy = self._keys_to_copy(call, slots.keys, key_norms, slots.source())
        if not self._store_as.errors or self.stored.keep == "keys":
            return to_copy
        if self.layer.outputs:
            to_copy.append((call, "errors", EncodeRequest(errors[:, list(self.layer.outputs)], self._error_name, None)))
        else:
            to_copy.append((call, "errors", EncodeRequest(errors, self._error_name, error_norms)))
        return to_copy

    def _summed(
        self, call: Call, slots: CallSlots, keys: Keys, errors: Tensor
    ) -> list[tuple[Call, str, EncodeRequest]] | None:
        """Sum the slots of each row, where that takes less to store; None where it does not."""
        kept = errors[:, list(self.layer.outputs)] if self.layer.outputs else errors
        given = SlotsOfCall(self.layer, slots.layout.rows, slots.keys, keys, kept, call.silent)
        if self.stored.projected_from is not None:
            given = projected(given, self.stored)
        sums = summed(given)
        if sums is None:
            return self._projected(call, given) if given.layer is self.stored else None
        every = self._store_as.curvature_every
        if every and call.batch.step % every == 0:
            call.curvature = counted(self.stored, given.keys, given.errors, given.silent)
        call.sums = sums.known
        call.positions = sums.positions
        call.silent = sums.silent
        call.may_repeat = False
        if sums.errors is None:
            call.shape = (0, *call.shape[1:]) if self.stored.form == "maps" else ()
            return [(call, "keys", EncodeRequest(sums.keys, f"{self.layer.name}.gradient"))]
        errors_to_copy = (call, "errors", EncodeRequest(sums.errors, self._error_name))
        return [*self._keys_to_copy(call, sums.keys), errors_to_copy]

    def _projected(self, call: Call, given: SlotsOfCall) -> list[tuple[Call, str, EncodeRequest]]:
        """Projected slots that take less than their sum would."""
        call.may_repeat = False
        call.shape = ()
        keys = (call, "keys", EncodeRequest(given.stored_keys, self._key_name))
        return [keys, (call, "errors", EncodeRequest(given.errors, self._error_name))]

    def _keys_to_copy(
        self, call: Call, keys: Tensor, norms: Tensor | None = None, source: Hashable | None = None
    ) -> list[tuple[Call, str, EncodeRequest]]:
        if self.stored.form == "numbers":
            call.keys = encode_numbers(keys)
            return []
        request = EncodeRequest(keys, self._key_name, norms, as_they_are=True, source=source)
        return [(call, "keys", request)]

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
            may_repeat=self._keys_may_repeat and visit.is_data,
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


def silent_slots(errors: Tensor, norms: Tensor) -> Bools | None:
    """Return which error signals (n, d_out) are exactly zero, so that their slots wrote nothing (padding, ignored labels): (n,), or None if none is.

    norms: theirs, (n,).
    """
    silent: Bools = norms.cpu().numpy() == 0
    if not silent.any():
        return None
    # The norm of a vector of tiny numbers is zero, too: their squares vanish
    silent[silent] = ~errors[torch.from_numpy(silent)].any(1).cpu().numpy()
    return silent if silent.any() else None


def _size_of_keys(keys: Keys, norms: Tensor | None) -> float:
    """The norm of keys, or a bound on it. norms: of each of them, if they are vectors."""
    if isinstance(keys, OneHot):
        return math.sqrt(len(keys))
    if isinstance(keys, Patches):
        # A pixel is part of as many patches as the kernel has places, at most
        return math.sqrt(math.prod(keys.geometry.kernel)) * norm_of_tensor(keys.maps)
    assert norms is not None
    return norm_of_rows(norms, keys.vectors())
