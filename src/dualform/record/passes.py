"""The ledger: what was captured since the last step, until an optimizer turns it into an update.

A parameter has a chain of links, one for each backward pass that added to its gradient; a layer has calls, the slots of each
pass. A parameter may be used by several layers (tied weights), a layer may use several parameters.

What arrives in a backward pass is held and looked at when the pass has ended: its calls share the few operations on small numbers,
and find the processor's cache warm. Who holds a tensor keeps autograd from changing it in place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from dualform.errors import BatchError, DualformError
from dualform.layers.found import Errors, Found, Watch
from dualform.layers.keys import Keys, Maps, Numbers, Vectors
from dualform.layers.rows import Layout
from dualform.layers.streams import Layer, Use, joined
from dualform.record.columns import Batch
from dualform.record.forward_pass import ForwardPass, RowFinder
from dualform.record.parameters import ParameterLedger, norm_of_rows
from dualform.record.silent import silent_slots
from dualform.record.slot_loop import Slots, Taker, Taking
from dualform.store.encoding import Encoded, Pool, Wanted, encode_all, encode_numbers
from dualform.store.records import Block

CONSUMED = 64
"""How many backward passes of earlier steps a layer remembers, to say so if one of them is used again."""
ARRIVED = 32 << 20
"""So many bytes of error signals are held before they are looked at, even if the backward pass has not ended."""
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
    """One call of a module in a forward pass."""

    serial: int
    module: ModuleLedger
    batch: Batch | None
    key: Tensor
    """What came in."""
    forward: ForwardPass | None
    """The forward pass it was part of; None: it was run again in a backward pass, and no forward pass is known."""
    call: int | None
    """Its number among the calls of its module in that forward pass; None: not known."""
    own_problem: DualformError | None
    outputs: int = 1
    """How many tensors came out. Not the tensors: their hooks hold the visit, and so nothing would be freed in time."""
    slots: Callable[[Errors], list[Found]] | None = None
    """What the gradients of these say; None: what came in is the keys, and what arrives the error signals."""
    arrival: int = 0
    """How many other visits' error signals had arrived before its own in the backward pass."""

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
class Pass:
    """A backward pass that is under way."""

    arrived: dict[Visit, list[Tensor | None]] = field(default_factory=dict)
    """The gradients of what came out of each visit."""
    counted: list[ParameterLedger] = field(default_factory=list)
    """The parameters that it has reached."""
    visits: int = 0
    """How many visits' error signals have arrived."""


@dataclass(slots=True)
class Arrived:
    """Keys and error signals of a visit, for one layer: a row for each slot, or for each of its feature maps."""

    layer: LayerLedger
    visit: Visit
    rows: int
    positions: int
    shape: tuple[int, ...]
    stored: Tensor
    """The keys as they are stored."""
    errors: Tensor | None
    slots: Slots | None = None
    """The same, if they may be taken by the compiled loop."""
    is_shared: bool = False
    key_terms: float = 0.0
    """This and the next one: as Found has them."""
    error_terms: float = 0.0

    def keys(self) -> Keys:
        """The keys as what they stand for."""
        layer = self.layer.layer
        if layer.geometry is not None:
            return Maps(self.stored.reshape(-1, layer.geometry.channels, *self.shape[1:]), layer.geometry)
        assert self.errors is not None
        return Numbers(self.stored, layer.d_in, self.errors.dtype) if layer.form == "numbers" else Vectors(self.stored)


class LayerLedger:
    """The slots of one layer since its last update."""

    def __init__(self, number: int, layer: Layer, parameters: dict[str, ParameterLedger], store_as: StoreAs):
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
        self.taking: Taking | None = None
        """How its slots are taken by the compiled loop, if they can be."""
        if like_linear and weight.in_columns:
            bias = self.uses[1][1] if len(self.uses) > 1 else None
            self.taking = Taking(weight, bias, self._key_name, self._error_name, store_as.keeps_errors)

    def read(self, task: int, visit: Visit, found: Found, layout: Layout) -> Arrived:
        """What has arrived at one call, a row for each slot."""
        layer, keys, positions = self.layer, found.keys, layout.positions
        shared = layout.is_shared
        if found.errors is None:
            return Arrived(self, visit, layout.rows, positions, (), layout.slots(keys), None, is_shared=shared)
        errors = found.errors
        if errors.dtype in HALVES:  # autocast: the gradient is made of the input as it was cast
            kind = self.uses[0][1].parameter.dtype
            for _, parameter in self.uses:
                link = parameter.link(task)
                link.coarse_dtype = errors.dtype
                # Some convolutions round what each image adds
                link.partial_sums += found.partial_sums if layer.geometry is None else len(errors)
                link.is_rounded_otherwise |= found.is_rounded_otherwise
            if keys.is_floating_point() and layer.form != "parts":  # a part is a product already, not an input
                keys = keys.to(errors.dtype).to(kind)
            errors = errors.to(kind)
        if layer.geometry is not None:
            size = tuple(keys.shape[2:])
            stored = layout.slots(keys.flatten(1))
            errors = layout.slots(errors.flatten(1)).reshape(-1, errors.shape[-1])
            count = positions * math.prod(layer.geometry.positions(size))
            return Arrived(self, visit, layout.rows, count, (positions, *size), stored, errors, is_shared=shared)
        keys, errors = layout.slots(keys), layout.slots(errors)
        slots = None if self.taking is None else Slots(keys, errors, self.taking, self.may_repeat(visit))
        terms = found.key_terms, found.error_terms
        return Arrived(self, visit, layout.rows, positions, (), keys, errors, slots, shared, *terms)

    def add(self, task: int, arrived: Arrived) -> list[tuple[Call, str, Wanted]]:
        """Add what one call has to say on the gradients. Gives what is yet to be copied: vectors, and the field of the call they go to."""
        call = self._call(task, arrived.visit, arrived.rows, arrived.positions, arrived.shape, shared=arrived.is_shared)
        errors, arrived.stored = arrived.errors, arrived.stored.detach()
        if errors is None:
            for _, parameter in self.uses:
                parameter.link(task).audited = False
            return self._wanted(call, arrived.stored, None)
        errors = arrived.errors = errors.detach()
        norms = torch.linalg.vector_norm(errors, dim=1)
        call.silent = silent_slots(errors)
        if call.silent is not None and self.layer.form == "parts":
            # A normalisation sums the error signals of several positions: they may cancel while the weight's part does not
            call.silent &= ~arrived.stored.any(1).cpu().numpy()
        size_of_errors = max(norm_of_rows(norms, errors), arrived.error_terms)
        keys = arrived.keys()
        for use, parameter in self.uses:
            if parameter.parameter.requires_grad:
                parameter.add(task, use, keys, errors, size_of_errors, arrived.key_terms)
        if not self._store_as.keeps_errors:
            return self._wanted(call, arrived.stored, None)
        outputs = list(self.layer.outputs)
        some, known = (errors[:, outputs], None) if outputs else (errors, norms)
        return self._wanted(call, arrived.stored, Wanted(some, self._error_name, known))

    def _wanted(self, call: Call, keys: Tensor, errors: Wanted | None) -> list[tuple[Call, str, Wanted]]:
        wanted = [] if errors is None else [(call, "errors", errors)]
        if self.layer.form == "numbers":
            call.keys = encode_numbers(keys)
        else:
            wanted.append((call, "keys", Wanted(keys, self._key_name, as_they_are=True)))
        return wanted

    def add_taken(
        self,
        task: int,
        visit: Visit,
        rows: int,
        positions: int,
        slots: Slots,
        *,
        shared: bool = False,
        error_terms: float = 0.0,
    ) -> None:
        """The same for slots that are copied already, of something like nn.Linear: its weight, and its bias if it has one."""
        call = self._call(task, visit, rows, positions, (), slots.key_copy, slots.error_copy, shared=shared)
        call.silent = slots.silent
        for parameter, added, scale in slots.added(error_terms):
            if parameter.parameter.requires_grad:
                parameter.link(task).add(added, scale)

    def may_repeat(self, visit: Visit) -> bool:
        """Whether keys of a visit may come again."""
        return self._keys_may_repeat and not visit.key.requires_grad

    def _call(
        self,
        task: int,
        visit: Visit,
        rows: int,
        positions: int,
        shape: tuple[int, ...],
        keys: Encoded | None = None,
        errors: Encoded | None = None,
        *,
        shared: bool,
    ) -> Call:
        """Enter a call."""
        assert visit.batch is not None
        place = self.number, 0, 0, 0, rows, positions
        what = keys or NOTHING, errors, self.may_repeat(visit), shape, visit.arrival
        call = Call(*place, *what, serial=visit.serial, batch=visit.batch, is_shared=shared)
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


class ModuleLedger:
    """One module, with the layers that it has."""

    def __init__(self, name: str, module: nn.Module, layers: list[LayerLedger]):
        self.name, self.module, self.layers = name, module, layers
        self.by_name = {layer.layer.name: layer for layer in layers}
        self.parameters = list({id(p): p for layer in layers for _, p in layer.uses}.values())
        self.called = False
        self.watched = False
        """Whether all its parameters have hooks."""

    def pending(self) -> bool:
        """Whether anything has arrived since its last update."""
        for parameter in self.parameters:
            if parameter.links:
                return True
        for layer in self.layers:  # noqa: SIM110 (at every call: no generator)
            if layer.calls or layer.problems:
                return True
        return False

    def counted_in(self, task: int) -> bool:
        """Whether a backward pass has reached its parameters: then all gradients of what came out have arrived."""
        for parameter in self.parameters:
            for link in parameter.links:
                if link.counted and link.task == task:
                    return True
        return False


class Ledger:
    """Listens to the hooks. Problems are kept with the pass they concern and raised only if that pass counts."""

    def __init__(
        self,
        *,
        store_as: StoreAs,
        rows: RowFinder,
        seed: int,
        graph_task: Callable[[], int] = torch._C._current_graph_task_id,
        when_ended: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback,
    ):
        """graph_task: gives the number of the backward pass that is running, −1 outside of one; when_ended: does something at its end."""
        self.modules: list[ModuleLedger] = []
        self.layers: list[LayerLedger] = []
        self.parameters: dict[int, ParameterLedger] = {}
        """By the parameter's id."""
        self.seed = seed
        """The recording's private random seed; each parameter's R is drawn from it and the parameter's name."""
        self.batch: Batch | None = None
        self.spent: set[ModuleLedger] = set()
        """Modules whose update has happened since the last batch() call: new slots there have no rows."""
        self.calls_since_backward = 0
        """How many batch() calls there were since the last backward pass."""
        self.pending = False
        """Whether gradients have arrived since the last update."""
        self.store_as, self.rows = store_as, rows
        self._last_forward: ForwardPass | None = None
        self._graph_task, self._when_ended = graph_task, when_ended
        self._serial = 0
        self.last_task = -1
        """The last backward pass that was seen."""
        self._passes: dict[int, Pass] = {}
        """Those that are under way."""
        self._arrived_bytes, self._taker = 0, Taker(store_as.dtype, store_as.pool)

    def enter(self, name: str, module: nn.Module, layers: list[Layer], named: dict[str, nn.Parameter]) -> ModuleLedger:
        """Enter a module. named: the parameters that its layers use, by full name."""
        vectors = set[str]().union(*(layer.vectors() for layer in layers))
        mine = {full: self.parameter(full, p, vector=full in vectors) for full, p in named.items()}
        entered = [LayerLedger(len(self.layers) + i, layer, mine, self.store_as) for i, layer in enumerate(layers)]
        self.layers += entered
        ledger = ModuleLedger(name, module, entered)
        self.modules.append(ledger)
        self.rows.recorded[name] = module
        return ledger

    def parameter(self, name: str, parameter: nn.Parameter, *, vector: bool) -> ParameterLedger:
        """The ledger of a parameter; made if there is none yet."""
        if id(parameter) not in self.parameters:
            self.parameters[id(parameter)] = ParameterLedger(
                len(self.parameters), name, parameter, self.seed, vector=vector
            )
        return self.parameters[id(parameter)]

    def begin(self, batch: Batch) -> None:
        """A new batch() call."""
        if self.batch is not None and not self.batch.is_used:
            raise BatchError(
                "recorder.batch() was called again before a forward pass used the rows of the call before. Call it right before the "
                "forward pass of these rows: not in a data collator or loader, which may run ahead of the training, and not for "
                "evaluation without gradients, which leaves no slots."
            )
        self.batch = batch
        self.spent.clear()
        self.calls_since_backward += 1

    def in_backward(self) -> bool:
        """Whether a backward pass is running: modules called then are run again (activation checkpointing)."""
        return self._graph_task() >= 0

    def begin_forward(self, module: nn.Module) -> ForwardPass:
        """The outermost module of a forward pass is called, with gradients on."""
        self._last_forward = self.rows.begin(module, self.batch)
        return self._last_forward

    def forward(
        self, module: ModuleLedger, key: Tensor, forward: ForwardPass | None, watch: Watch | None = None
    ) -> Visit:
        """A module has been called with gradients on.

        forward: the pass it is part of; None: it is run again in a backward pass. watch: where its slots come from, if that is more than
        what came in and out.
        """
        module.called = True
        problem: DualformError | None = None
        if not self.in_backward():
            self._passes.clear()  # of a pass that never ended: something was raised in it
            self._drop_uncounted(module)
        elif self.calls_since_backward > 1:
            problem = BatchError(
                f"layer {module.name!r} was run again during a backward pass (activation checkpointing) after "
                f"{self.calls_since_backward} batch() calls, so its rows could be of any of them. Call batch(), forward "
                f"and backward in turn for each microbatch, or use checkpoint(…, use_reentrant=False)."
            )
        batch = self.batch
        if batch is None:
            problem = BatchError(
                "no recorder.batch() call before this step. Call recorder.batch(sample_id=…, …) with one entry per "
                "row before each forward pass that is trained on."
            )
        elif module in self.spent:
            problem = BatchError(
                f"layer {module.name!r} was trained on again without a new recorder.batch() call since its last "
                f"update. Call recorder.batch() before each forward pass, so that its slots get the right rows."
            )
        self._serial += 1
        call = None if forward is None else forward.called(module.name, key)
        within = forward or self._last_forward
        if watch is None:
            return Visit(self._serial, module, batch, key, within, call, problem)
        slots, keys = watch.slots, watch.keys
        if keys is not None and not self.store_as.errors:
            slots = lambda errors: keys()  # noqa: E731
        return Visit(self._serial, module, batch, key, within, call, problem, len(watch.outputs), slots)

    def _drop_uncounted(self, module: ModuleLedger) -> None:
        """Passes that never reached a parameter: autograd.grad."""
        if not module.pending():
            return  # the ordinary case: the last update has cleared everything
        counted = {link.task for p in module.parameters for link in p.links if link.counted}
        for p in module.parameters:
            p.links = [link for link in p.links if link.counted]
        for layer in module.layers:
            layer.forget({task for task in (*layer.calls, *layer.problems) if task not in counted})

    def backward(self, visit: Visit, place: int, error: Tensor) -> None:
        """An error signal arrives at one of a visit's outputs."""
        task = self._graph_task()
        module, under_way = visit.module, self._passes.get(task)
        if under_way is None:  # the first of its backward pass
            self.calls_since_backward = 0
            self.last_task = max(self.last_task, task)
            under_way = self._passes[task] = Pass()
            self._when_ended(partial(self.settle, task))
        for p in module.parameters:
            if p.parameter.grad is not None and p.parameter.requires_grad:
                p.begin(task)
        problem = visit.problem
        if problem is not None:
            for layer in module.layers:
                layer.problems[task] = problem
            return
        errors = under_way.arrived.get(visit)
        if errors is None:
            errors = under_way.arrived[visit] = [None] * visit.outputs
            visit.arrival = under_way.visits
            under_way.visits += 1
        before = errors[place]
        errors[place] = error if before is None else before + error
        self._arrived_bytes += error.nbytes
        if self._arrived_bytes > ARRIVED:
            self._look_now(task, under_way, [one for one in under_way.arrived if one.outputs == 1])

    def counted(self, parameter: ParameterLedger, _: object = None) -> None:
        """A parameter's .grad has been added to: the slots of this pass count for it."""
        self.pending, task = True, self._graph_task()
        under_way = self._passes.get(task)
        if under_way is None:  # nothing of it came through a module
            self.last_task = max(self.last_task, task)
            parameter.begin(task)
            parameter.link(task).counted = True
        else:
            under_way.counted.append(parameter)

    def settle(self, task: int) -> None:
        """A backward pass has ended: look at what has arrived, where it has reached a parameter."""
        ended = self._passes.pop(task, None)
        if ended is None:
            return
        self._count(task, ended)
        self._settle(task, {one: errors for one, errors in ended.arrived.items() if one.module.counted_in(task)})

    def settle_early(self) -> None:
        """An optimizer steps within a backward pass (in a hook of a parameter): look at what it may need."""
        for task, under_way in self._passes.items():
            self._count(task, under_way)
            ready = [one for one in under_way.arrived if one.outputs == 1 or one.module.counted_in(task)]
            self._look_now(task, under_way, ready)

    def _look_now(self, task: int, under_way: Pass, visits: list[Visit]) -> None:
        self._settle(task, {one: under_way.arrived.pop(one) for one in visits})

    def _count(self, task: int, some: Pass) -> None:
        """The slots of a pass count for the parameters that it has reached."""
        visited = {parameter for visit in some.arrived for parameter in visit.module.parameters}
        for parameter in some.counted:
            if parameter not in visited:  # it came some other way than through its module
                parameter.begin(task)
            parameter.link(task).counted = True
        some.counted.clear()

    @torch.no_grad()
    def _settle(self, task: int, arrived: dict[Visit, list[Tensor | None]]) -> None:
        """Find the slots of some visits, and copy them."""
        read = [one for visit, errors in arrived.items() for one in self._read(visit, errors, task)]
        slots = [one.slots for one in read if one.slots is not None]
        self._taker.take(slots)
        wanted = []
        for one in read:
            if one.slots is not None and one.slots.taken:
                size = one.rows, one.positions
                one.layer.add_taken(
                    task, one.visit, *size, one.slots, shared=one.is_shared, error_terms=one.error_terms
                )
            else:
                wanted += one.layer.add(task, one)
        if wanted:
            copied = encode_all([one for _, _, one in wanted], self.store_as.dtype, self.store_as.pool)
            for (call, name, _), vectors in zip(wanted, copied, strict=True):
                setattr(call, name, vectors)
        self._arrived_bytes = 0

    def _read(self, visit: Visit, errors: list[Tensor | None], task: int) -> Iterator[Arrived]:
        """All gradients of a visit are there: read them as keys and error signals of its layers."""
        module = visit.module
        for one in [Found("", visit.key, errors[0])] if visit.slots is None else visit.slots(errors):
            layer = module.by_name[joined(module.name, one.layer)]
            try:
                layout = self._layout(layer.layer.name, visit, one)
            except DualformError as problem:
                layer.problems[task] = problem
                continue
            yield layer.read(task, visit, one, layout)

    def _layout(self, layer: str, visit: Visit, found: Found) -> Layout:
        assert visit.batch is not None
        leading = found.keys.dim() - 1 if found.lead is None else found.lead
        lead = tuple(found.keys.shape[:leading])
        return self.rows.layout(layer, visit.forward, visit.call, visit.batch.rows, lead, found.axis)
