"""The hooks. They compute nothing: each tells the ledger what happened.

Tensor hooks on what a module gives back pair keys and error signals: module hooks alone fire twice under checkpointing. The
number of the graph task tells backward passes apart, so that a pass that never reaches the parameter does not count. What has
arrived is looked at when the pass has ended, by a callback of autograd's engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.errors import RecordingError
from dualform.layers.rules import rule_for
from dualform.record.forward_pass import ForwardPass
from dualform.record.passes import Ledger, ModuleLedger


class Capture:
    """Hooks on a model and on the parameters of its recorded modules, until removed."""

    def __init__(self, model: nn.Module, ledger: Ledger, before_forward: Callable[[], None] | None):
        self._model, self._ledger = model, ledger
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        self._containers: set[nn.Module] = set()
        self._forward: ForwardPass | None = None
        """The forward pass that is under way."""
        self._depth = 0
        """How many calls of its outermost module are within each other."""
        # Hooks are plain functions: a deep copy of the model shares them, and they know that it is another one
        if before_forward is not None:
            self._handles.append(model.register_forward_pre_hook(lambda module, _: before_forward()))

    def add(self, entry: ModuleLedger) -> None:
        """Hook a module, and those that it is part of."""
        rule = rule_for(entry.module)
        assert rule is not None
        for name, module in self._model.named_modules():
            if module is not entry.module and (not name or entry.name.startswith(f"{name}.")):
                self._hook_container(module)
        begun: list[Any] = []
        ledger, key = self._ledger, rule.key

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module is not entry.module:
                return
            if ledger.batch is not None:
                ledger.batch.is_used = True
            if not torch.is_grad_enabled():
                return
            if torch.compiler.is_compiling():
                raise RecordingError(
                    f"layer {entry.name!r} is being compiled (torch.compile), and hooks inside a compiled graph see no error "
                    f"signals. Record the model without compiling it."
                )
            if not entry.watched:
                self._watch(entry)
            forward = self._forward
            is_outermost = forward is None and not ledger.in_backward()
            if is_outermost:
                forward = ledger.begin_forward(module)
            if key:  # the ordinary case, in as few calls as can be
                if output.requires_grad:
                    visit = ledger.forward(entry, args[0] if args else kwargs[key], forward)
                    _hook(output, partial(ledger.backward, visit, 0))
            else:
                for watch in rule.watch(module, (args, kwargs), output, begun.pop() if begun else None):
                    found = None
                    for place, tensor in enumerate(watch.outputs):
                        if tensor.requires_grad:
                            found = found or ledger.forward(entry, watch.key, forward, watch)
                            tensor.register_hook(partial(ledger.backward, found, place))  # type: ignore[no-untyped-call]
            if is_outermost and forward is not None:
                ledger.rows.end(forward, (args, kwargs))

        if rule.begin is not None:
            begin = rule.begin

            def before(module: nn.Module, args: Any) -> None:
                begun[:] = [begin(module)]

            self._handles.append(entry.module.register_forward_pre_hook(before))
        self._handles.append(entry.module.register_forward_hook(after, with_kwargs=True))
        self._watch(entry)

    def _hook_container(self, container: nn.Module) -> None:
        """Notice when a module that recorded ones are part of is called from outside: a forward pass begins with it, and ends."""
        if container in self._containers:
            return
        self._containers.add(container)

        def before(module: nn.Module, args: Any) -> None:
            if module is not container:
                return
            if self._forward is None:
                if torch.is_grad_enabled() and not self._ledger.in_backward():
                    self._forward = self._ledger.begin_forward(module)
            elif self._forward.module is module:
                self._depth += 1

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            forward = self._forward
            if module is container and forward is not None and forward.module is module and not self._depth:
                self._forward = None
                self._ledger.rows.end(forward, (args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module is container and self._forward is not None and self._forward.module is module:
                if self._depth:
                    self._depth -= 1
                else:
                    self._forward = None  # it has raised an error

        self._handles.append(container.register_forward_pre_hook(before))
        self._handles.append(container.register_forward_hook(after, with_kwargs=True))
        self._handles.append(container.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Leave model and parameters as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, entry: ModuleLedger) -> None:
        """Hook the parameters that can have a gradient now: a frozen layer may be thawed later."""
        for ledger in entry.parameters:
            if ledger.parameter.requires_grad and id(ledger.parameter) not in self._hooked:
                self._hooked.add(id(ledger.parameter))
                hook = partial(self._ledger.counted, ledger)
                self._handles.append(ledger.parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        entry.watched = all(id(ledger.parameter) in self._hooked for ledger in entry.parameters)


def _hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """As `tensor.register_hook`, without a handle: nobody removes it, and to make one takes longer than all the rest."""
    if tensor._backward_hooks is not None or tensor.grad_fn is None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    tensor._backward_hooks = OrderedDict([(-1, hook)])  # handles are numbered from 0
    tensor.grad_fn._register_hook_dict(tensor)
