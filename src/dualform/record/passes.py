"""What was captured since the last step, until an optimizer turns it into an update.

A parameter has a chain of shares, one for each backward pass that added to its gradient; a layer has the calls of each pass.

What arrives in a backward pass is held and looked at when the pass has ended: its calls share the few operations on small numbers,
and find the processor's cache warm. Who holds a tensor keeps autograd from changing it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from dualform.errors import BatchError, DualformError, UnexplainedError
from dualform.layers.layer import Layer, joined
from dualform.layers.rows import Layout
from dualform.layers.slot_source import Errors, LayerSlots
from dualform.record.columns import Batch
from dualform.record.forward_pass import ForwardPass, RowFinder
from dualform.record.parameters import RecordedParameter
from dualform.record.recorded import Arrival, CallSlots, RecordedLayer, RecordedModule, StoreAs, Visit
from dualform.store.encoding import encode_all

ARRIVED = 32 << 20
"""So many bytes of error signals are held before they are looked at, even if the backward pass has not ended."""
IGNORED_HOOKS = (
    "Code that torch.compile made for another model of the same class, after record(), ignores the hooks of this one. Call "
    "torch.compiler.reset() before the recorded model is called"
)


@dataclass(slots=True)
class Pass:
    """A backward pass that is under way."""

    arrived: list[Arrival] = field(default_factory=list)
    """What has not been looked at yet."""
    counted: list[RecordedParameter] = field(default_factory=list)
    """The parameters that it has reached."""
    arrivals: int = 0
    """How many there were."""


class PendingPasses:
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
        self.modules: list[RecordedModule] = []
        self.layers: list[RecordedLayer] = []
        self.parameters: dict[int, RecordedParameter] = {}
        """By the parameter's id."""
        self.seed = seed
        """The recording's private random seed; each parameter's R is drawn from it and the parameter's name."""
        self.batch: Batch | None = None
        self.spent: set[RecordedModule] = set()
        """Modules whose update has happened since the last batch() call: new slots there have no rows."""
        self.calls_since_backward = 0
        """How many batch() calls there were since the last backward pass."""
        self.updates = 0
        """How many updates there were."""
        self.pending = False
        """Whether gradients have arrived since the last update."""
        self.store_as, self.rows = store_as, rows
        self._last_forward: ForwardPass | None = None
        self._graph_task, self._when_ended = graph_task, when_ended
        self._serial = 0
        self.last_task = -1
        """The last backward pass that was seen."""
        self._running: dict[int, Pass] = {}
        """Those that are under way."""
        self._arrived_bytes = 0

    def enter(
        self, name: str, module: nn.Module, layers: list[Layer], named: dict[str, nn.Parameter]
    ) -> RecordedModule:
        """Enter a module. named: the parameters that its layers use, by full name."""
        vectors = set[str]().union(*(layer.vectors() for layer in layers))
        mine = {full: self.parameter(full, p, vector=full in vectors) for full, p in named.items()}
        entered = [
            RecordedLayer(len(self.layers) + i, layer, mine, self.store_as, self.seed) for i, layer in enumerate(layers)
        ]
        self.layers += entered
        recorded = RecordedModule(name, module, entered)
        self.modules.append(recorded)
        self.rows.recorded[name] = module
        return recorded

    def parameter(self, name: str, parameter: nn.Parameter, *, vector: bool) -> RecordedParameter:
        """A parameter as it is recorded; made if there is none yet."""
        if id(parameter) not in self.parameters:
            self.parameters[id(parameter)] = RecordedParameter(
                len(self.parameters), name, parameter, self.seed, vector=vector
            )
        return self.parameters[id(parameter)]

    def begin(self, batch: Batch) -> None:
        """A new batch() call."""
        if self.batch is not None and not self.batch.is_used:
            if self.pending and not any(module.called for module in self.modules):
                raise BatchError(f"gradients have arrived, but no recorded module was called. {IGNORED_HOOKS}.")
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

    def compiled_forward(self, model: nn.Module) -> ForwardPass:
        """The forward pass of a model that is compiled as a whole: nothing tells when it begins, so there is one for each batch() call."""
        last = self._last_forward
        if last is None or not last.is_compiled or last.batch is not self.batch:
            last = self.begin_forward(model)
            last.is_compiled = True
        return last

    def forward(
        self,
        module: RecordedModule,
        key: Tensor,
        forward: ForwardPass | None,
        slots: Callable[[Sequence[Tensor], Errors], list[LayerSlots]],
        *,
        is_data: bool,
    ) -> Visit:
        """A module has been called with gradients on.

        forward: the pass it is part of; None: it is run again in a backward pass. slots, is_data: as Visit has them.
        """
        module.called = True
        problem: DualformError | None = None
        if not self.in_backward():
            self._running.clear()  # of a pass that never ended: something was raised in it
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
        if forward is not None and forward.is_compiled:
            self.rows.assume(forward, module.name)
        return Visit(self._serial, module, batch, forward or self._last_forward, call, slots, is_data, problem)

    def _drop_uncounted(self, module: RecordedModule) -> None:
        """Passes that never reached a parameter: autograd.grad."""
        if not module.pending():
            return  # the ordinary case: the last update has cleared everything
        counted = {share.task for p in module.parameters for share in p.shares if share.counted}
        for p in module.parameters:
            p.shares = [share for share in p.shares if share.counted]
        for layer in module.layers:
            layer.forget({task for task in (*layer.calls, *layer.problems) if task not in counted})

    def backward(
        self, visit: Visit, errors: Sequence[Tensor | None], saved: Sequence[Tensor] | None, *, is_lent: bool = False
    ) -> None:
        """A backward pass has reached a visit.

        saved: None if it was changed in place. is_lent: whether the memory of all these tensors will be used for something else when
        this function has returned.
        """
        task = self._graph_task()
        module = visit.module
        under_way = self._running.get(task)
        if under_way is None:  # the first of its backward pass
            self.calls_since_backward = 0
            self.last_task = max(self.last_task, task)
            under_way = self._running[task] = Pass()
            self._when_ended(partial(self.settle, task))
        for p in module.parameters:
            if p.tensor.grad is not None and p.tensor.requires_grad:
                p.begin(task)
        problem = visit.problem
        if problem is None and saved is None:
            problem = UnexplainedError(
                f"layer {module.name!r}: its input was changed in place after it had run, so its keys are lost. Change a copy "
                f"instead (x = x + y, not x += y)."
            )
        if problem is not None:
            for layer in module.layers:
                layer.problems[task] = problem
            return
        assert saved is not None
        arrival = Arrival(visit, under_way.arrivals, errors, saved)
        under_way.arrivals += 1
        if is_lent:
            self._settle(task, [arrival])
            return
        under_way.arrived.append(arrival)
        self._arrived_bytes += sum(error.nbytes for error in errors if error is not None)
        if self._arrived_bytes > ARRIVED:
            self._look_now(task, under_way)

    def counted(self, parameter: RecordedParameter, _: object = None) -> None:
        """A parameter's .grad has been added to: the slots of this pass count for it."""
        self.pending, task = True, self._graph_task()
        under_way = self._running.get(task)
        if under_way is None:  # nothing of it came through a module
            self.last_task = max(self.last_task, task)
            parameter.begin(task)
            parameter.share(task).counted = True
        else:
            under_way.counted.append(parameter)

    def settle(self, task: int) -> None:
        """A backward pass has ended: look at what has arrived, where it has reached a parameter."""
        ended = self._running.pop(task, None)
        if ended is None:
            return
        self._count(task, ended)
        self._arrived_bytes = 0
        self._settle(task, [one for one in ended.arrived if one.visit.module.counted_in(task)])

    def settle_early(self) -> None:
        """An optimizer steps within a backward pass (in a hook of a parameter): look at what it may need."""
        for task, under_way in self._running.items():
            self._count(task, under_way)
            self._look_now(task, under_way)

    def _look_now(self, task: int, under_way: Pass) -> None:
        arrived = under_way.arrived
        under_way.arrived = []
        self._arrived_bytes = 0
        self._settle(task, arrived)

    def _count(self, task: int, some: Pass) -> None:
        """The slots of a pass count for the parameters that it has reached."""
        visited = {parameter for one in some.arrived for parameter in one.visit.module.parameters}
        for parameter in some.counted:
            if parameter not in visited:  # it came some other way than through its module
                parameter.begin(task)
            parameter.share(task).counted = True
        some.counted.clear()

    @torch.no_grad()
    def _settle(self, task: int, arrived: Sequence[Arrival]) -> None:
        """Find the slots of some visits, and copy them."""
        to_copy = []
        for arrival in arrived:
            for call in self._read(arrival, task):
                to_copy += call.layer.add(task, call)
        copied = encode_all([vectors for _, _, vectors in to_copy], self.store_as.dtype, self.store_as.pool)
        for (block, field_name, _), vectors in zip(to_copy, copied, strict=True):
            setattr(block, field_name, vectors)

    def _read(self, arrival: Arrival, task: int) -> Iterator[CallSlots]:
        """Read what has arrived as keys and error signals of the module's layers."""
        visit = arrival.visit
        module = visit.module
        for one in visit.slots(arrival.saved, arrival.errors):
            layer = module.by_name[joined(module.name, one.layer)]
            try:
                layout = self._layout(layer.layer.name, visit, one)
            except DualformError as problem:
                layer.problems[task] = problem
                continue
            yield layer.read(task, arrival, one, layout)

    def _layout(self, layer: str, visit: Visit, found: LayerSlots) -> Layout:
        assert visit.batch is not None
        leading = found.keys.dim() - 1 if found.lead is None else found.lead
        lead = tuple(found.keys.shape[:leading])
        return self.rows.layout(layer, visit.forward, visit.call, visit.batch.rows, lead, found.axis)
