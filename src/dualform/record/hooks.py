"""The hooks. They compute nothing: each tells `passes.py` what happened.

A forward hook returns what a module gave through a tap (`tap.py`), which hands over keys and error signals in the backward pass. The
number of the graph task tells backward passes apart, so that a pass that never reaches the parameter does not count. What has
arrived is looked at when the pass has ended, by a callback of autograd's engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it does not import the compiler
from torch.utils.hooks import RemovableHandle

from dualform.errors import RecordingError
from dualform.layers.rules import Rule, rule_for
from dualform.layers.slot_source import Arguments, Errors, LayerSlots, SlotSource, map_tensors
from dualform.record import tap
from dualform.record.forward_pass import ForwardPass
from dualform.record.passes import PendingPasses
from dualform.record.recorded import RecordedModule, Visit

COMPILER = "torch._dynamo"


class Capture:
    """Hooks on a model and on the parameters of its recorded modules, until removed."""

    def __init__(
        self, model: nn.Module, outer: nn.Module, passes: PendingPasses, before_forward: Callable[[], None] | None
    ):
        """outer: what the training loop calls: the model itself, or what torch.compile(model) gave."""
        self._model = model
        self._outer = outer
        self._passes = passes
        self._compiled = CompiledCalls(self)
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        self._containers: set[nn.Module] = set()
        self.forward: ForwardPass | None = None
        """The forward pass that is under way."""
        self._depth = 0
        """How many calls of its outermost module are within each other."""
        # Hooks are plain functions: a deep copy of the model shares them, and they know that it is another one
        if before_forward is not None:
            self._handles.append(outer.register_forward_pre_hook(lambda module, _: before_forward()))

    def add(self, entry: RecordedModule) -> None:
        """Hook a module, and those that it is part of."""
        rule = rule_for(entry.module)
        assert rule is not None
        if self._outer is not self._model:
            self._hook_container(self._outer, self._model)
        for name, module in self._model.named_modules():
            if module is not entry.module and (not name or entry.name.startswith(f"{name}.")):
                self._hook_container(module, module)
        self._hook_module(entry, rule)
        self._hook_parameters(entry)

    def remove(self) -> None:
        """Leave model and parameters as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        tap.forget(self._compiled.recording)

    def _hook_module(self, entry: RecordedModule, rule: Rule) -> None:
        recorded = entry.module
        begun: list[Any] = []

        def record_call(module: nn.Module, arguments: Arguments, output: Any) -> Any:
            return self._record_call(entry, rule, arguments, output, begun.pop() if begun else None)

        outside_graphs = _disable_dynamo(record_call)
        # Modules that are computed once more are left to eager mode: the compiler interrupts its graph
        in_graphs = outside_graphs if rule.saved is None else self._compiled.tap_for(entry, rule)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if module is not recorded:
                return None
            if torch.compiler.is_compiling():
                return in_graphs(module, (args, kwargs), output)
            if COMPILER in sys.modules:  # between two graphs, the compiler would trace what this calls
                return outside_graphs(module, (args, kwargs), output)
            return record_call(module, (args, kwargs), output)

        if rule.begin is not None:
            begin = rule.begin

            def before(module: nn.Module, args: Any) -> None:
                begun[:] = [begin(module)]

            self._handles.append(recorded.register_forward_pre_hook(before))
        # Before all other hooks, so that these see what came through the tap
        self._handles.append(recorded.register_forward_hook(after, with_kwargs=True, prepend=True))

    def _record_call(self, entry: RecordedModule, rule: Rule, arguments: Arguments, output: Any, begun: Any) -> Any:
        """A recorded module has run: return what it gave, through a tap if it is trained on."""
        passes = self._passes
        if passes.batch is not None:
            passes.batch.is_used = True
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None
        if not entry.has_hooked_parameters:
            self._hook_parameters(entry)
        forward = self.forward
        is_outermost = forward is None and not passes.in_backward()
        if is_outermost:
            forward = passes.begin_forward(entry.module)
        if rule.replay is None:
            tapped = self._tap_simple(entry, rule, arguments, output, forward)
        else:
            source = rule.slot_source(entry.module, arguments, output, begun)
            tapped = self._tap_replayed(entry, source, output, forward)
        if is_outermost and forward is not None:
            passes.rows.end(forward, arguments)
        return tapped

    def _tap_simple(
        self, entry: RecordedModule, rule: Rule, arguments: Arguments, output: Tensor, forward: ForwardPass | None
    ) -> Tensor:
        """Tap a module whose slots are computed from its input and the gradient of its output."""
        if not output.requires_grad:
            return output
        assert rule.saved is not None
        assert rule.slots is not None
        saved = rule.saved(entry.module, arguments)
        slots = partial(rule.slots, entry.module)
        visit = self._passes.forward(entry, saved[0], forward, slots, is_data=not saved[0].requires_grad)
        [tapped] = tap.tap(partial(self._passes.backward, visit), [output], saved)
        return tapped

    def _tap_replayed(self, entry: RecordedModule, source: SlotSource, output: Any, forward: ForwardPass | None) -> Any:
        """Tap all that came out of a module that is computed once more in the backward pass."""
        tapped = [tensor for tensor in source.outputs if tensor.requires_grad]
        if not tapped:
            return output
        is_tapped = [tensor.requires_grad for tensor in source.outputs]

        def slots(saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
            if source.keys is not None and not self._passes.store_as.errors:
                return source.keys()
            given = iter(errors or ())
            return source.slots([next(given) if one else None for one in is_tapped])

        visit = self._passes.forward(entry, source.key, forward, slots, is_data=not source.key.requires_grad)
        aliases = tap.tap(partial(self._passes.backward, visit), tapped, ())
        by_id = {id(tensor): alias for tensor, alias in zip(tapped, aliases, strict=True)}
        return map_tensors(output, lambda tensor: by_id.get(id(tensor), tensor))

    def _hook_container(self, container: nn.Module, runs: nn.Module) -> None:
        """Notice when a module that recorded ones are part of is called from outside: a forward pass begins with it, and ends.

        runs: the module that then runs: itself, unless it is a wrapper.
        """
        if container in self._containers:
            return
        self._containers.add(container)

        def before(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling() or module is not container:
                return
            if self.forward is None:
                if _is_redirected(module):
                    return
                if torch.is_grad_enabled() and not self._passes.in_backward():
                    self.forward = self._passes.begin_forward(runs)
            elif self.forward.module is runs:
                self._depth += 1

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            forward = self.forward
            if module is container and forward is not None and forward.module is runs and not self._depth:
                self.forward = None
                self._passes.rows.end(forward, (args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if module is container and self.forward is not None and self.forward.module is runs:
                if self._depth:
                    self._depth -= 1
                else:
                    self.forward = None  # it has raised an error

        self._handles.append(container.register_forward_pre_hook(before))
        self._handles.append(container.register_forward_hook(after, with_kwargs=True))
        self._handles.append(container.register_forward_hook(leave, always_call=True))

    def _hook_parameters(self, entry: RecordedModule) -> None:
        """Hook the parameters that can have a gradient now: a frozen layer may be thawed later."""
        for parameter in entry.parameters:
            if parameter.tensor.requires_grad and id(parameter.tensor) not in self._hooked:
                self._hooked.add(id(parameter.tensor))
                hook = partial(self._passes.counted, parameter)
                self._handles.append(parameter.tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        entry.has_hooked_parameters = all(id(parameter.tensor) in self._hooked for parameter in entry.parameters)

    def open_compiled(
        self, entry: RecordedModule, key: Tensor, slots: Callable[..., list[LayerSlots]], is_data: bool
    ) -> Visit:
        """A compiled graph has called a module."""
        passes = self._passes
        if passes.batch is not None:
            passes.batch.is_used = True
        if not entry.has_hooked_parameters:
            self._hook_parameters(entry)
        forward = self.forward
        if forward is None and not passes.in_backward():
            forward = passes.compiled_forward(self._model)
        return passes.forward(entry, key, forward, slots, is_data=is_data)

    def hand_over(self, visit: Visit, error: Tensor, saved: Sequence[Tensor]) -> None:
        """A compiled backward pass has reached a call of a module."""
        # Compiled code reuses the memory of its tensors
        self._passes.backward(visit, [error], saved, is_lent=True)

    @property
    def updates(self) -> int:
        """How many updates there were."""
        return self._passes.updates


def _is_redirected(module: nn.Module) -> bool:
    """Whether Lightning has put training_step() in the place of a module's forward, which then calls the module: that call is the forward pass."""
    forward = vars(module).get("forward")
    return getattr(forward, "__qualname__", "").startswith("_ForwardRedirection.")


class CompiledCalls:
    """The calls of modules in compiled graphs, by number: a graph can hold numbers, but no objects."""

    def __init__(self, capture: Capture):
        self._capture = capture
        self.recording = tap.register(self)
        self._modules: list[tuple[RecordedModule, Callable[..., list[LayerSlots]]]] = []
        self._visits: dict[int, Visit] = {}
        self._earlier: dict[int, Visit] = {}
        """Those before the last update: a backward pass may still come."""
        self._updates = 0

    def tap_for(self, entry: RecordedModule, rule: Rule) -> Callable[[nn.Module, Arguments, Any], Any]:
        """A function that the compiler traces, which returns a module's output through a tap."""
        save = rule.saved
        assert save is not None
        assert rule.slots is not None
        recording = self.recording
        number = len(self._modules)
        self._modules.append((entry, partial(rule.slots, entry.module)))

        def tapped(module: nn.Module, arguments: Arguments, output: Tensor) -> Tensor | None:
            if not torch.is_grad_enabled() or not output.requires_grad:
                return None
            saved = save(module, arguments)
            return tap.compiled_tap(recording, number, output, saved)

        return tapped

    def open(self, module: int, key: Tensor, *, is_data: bool) -> int:
        """A module was called; return the number of the call."""
        if self._updates != self._capture.updates:
            self._updates = self._capture.updates
            self._earlier = self._visits
            self._visits = {}
        entry, slots = self._modules[module]
        visit = self._capture.open_compiled(entry, key, slots, is_data)
        self._visits[visit.serial] = visit
        return visit.serial

    def hand_over(self, call: int, error: Tensor, saved: Sequence[Tensor]) -> None:
        """A backward pass has reached a call."""
        visit = self._visits.get(call) or self._earlier.get(call)
        if visit is None:
            raise RecordingError(
                "a backward pass of a compiled model came more than one update after its forward pass, and what is needed to record "
                "it is gone. Call backward() before the next optimizer.step()."
            )
        self._capture.hand_over(visit, error, saved)
