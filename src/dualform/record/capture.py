"""The hooks. They compute nothing: each tells the ledger what happened.

A tensor hook on a layer's output pairs key and error signal: module hooks alone fire twice under checkpointing. The
number of the graph task tells backward passes apart, so that a pass that never reaches the parameter does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """What the hooks tell."""

    def forward(self, layer: int, arguments: tuple[tuple[Any, ...], dict[str, Any]], task: int) -> Any:
        """A layer is called with gradients on; the answer is given back when its error signal arrives."""

    def backward(self, layer: int, visit: Any, error: Tensor, task: int) -> None:
        """An error signal arrives at a layer's output."""

    def counted(self, layer: int, parameter: str, task: int) -> None:
        """A parameter's .grad has just been added to."""


def graph_task() -> int:
    """The number of the backward pass that is running, −1 outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


class Capture:
    """Hooks on a model and on the parameters of its recorded layers, until removed."""

    def __init__(self, model: nn.Module, listener: Listener, before_forward: Callable[[], None]):
        self._listener = listener
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        # Hooks are plain functions: a deep copy of the model shares them, and they know that it is another one
        self._handles.append(model.register_forward_pre_hook(lambda module, _: before_forward()))

    def add(self, number: int, module: nn.Module) -> None:
        """Hook a layer."""
        self._handles.append(module.register_forward_hook(self._forward(number, module), with_kwargs=True))
        self._watch(number, module)

    def remove(self) -> None:
        """Leave model and parameters as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _forward(self, number: int, original: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module is not original or not isinstance(output, Tensor) or not output.requires_grad:
                return
            self._watch(number, module)
            visit = self._listener.forward(number, (args, kwargs), graph_task())
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda error: self._listener.backward(number, visit, error, graph_task())
            )

        return hook

    def _watch(self, number: int, module: nn.Module) -> None:
        """Hook the parameters that can have a gradient now: a frozen layer may be thawed later."""
        for name in ("weight", "bias"):
            parameter = getattr(module, name)
            if parameter is not None and parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._counted(number, name)))

    def _counted(self, number: int, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._listener.counted(number, name, graph_task())
