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
from dualform.record.ledger import Ledger, ModuleLedger


class Capture:
    """Hooks on a model and on the parameters of its recorded modules, until removed."""

    def __init__(self, model: nn.Module, ledger: Ledger, before_forward: Callable[[], None] | None):
        self._ledger = ledger
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        # Hooks are plain functions: a deep copy of the model shares them, and they know that it is another one
        if before_forward is not None:
            self._handles.append(model.register_forward_pre_hook(lambda module, _: before_forward()))

    def add(self, entry: ModuleLedger) -> None:
        """Hook a module."""
        rule = rule_for(entry.module)
        assert rule is not None
        begun: list[Any] = []
        ledger, key = self._ledger, rule.key

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module is not entry.module or not torch.is_grad_enabled():
                return
            if torch.compiler.is_compiling():
                raise RecordingError(
                    f"layer {entry.name!r} is being compiled (torch.compile), and hooks inside a compiled graph see no error "
                    f"signals. Record the model without compiling it."
                )
            if not entry.watched:
                self._watch(entry)
            if key:  # the ordinary case, in as few calls as can be
                if output.requires_grad:
                    visit = ledger.forward(entry, args[0] if args else kwargs[key])
                    _hook(output, partial(ledger.backward, visit, 0))
                return
            for watch in rule.watch(module, (args, kwargs), output, begun.pop() if begun else None):
                found = None
                for place, tensor in enumerate(watch.outputs):
                    if tensor.requires_grad:
                        found = found or ledger.forward(entry, watch.key, watch)
                        tensor.register_hook(partial(ledger.backward, found, place))  # type: ignore[no-untyped-call]

        if rule.begin is not None:
            begin = rule.begin

            def before(module: nn.Module, args: Any) -> None:
                begun[:] = [begin(module)]

            self._handles.append(entry.module.register_forward_pre_hook(before))
        self._handles.append(entry.module.register_forward_hook(after, with_kwargs=True))
        self._watch(entry)

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
