"""Taps: how the error signal of a module's output is captured, in eager mode and under torch.compile.

A tap is the identity on what a module returned. Autograd saves the tensors that the module's slots are computed from, as it does for
the module itself, and hands them over with the error signal in the backward pass: once for each call that is trained on, also where
activation checkpointing runs a forward pass twice.

A compiled graph runs no Python of ours. There, a tap calls two custom operators, which are opaque to the compiler and run when the
graph runs: one says that a module was called, one hands over what the backward pass brings. Both return copies that the graph goes on
with, so they are neither removed nor moved to the other pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

CLOSED = -1
"""The number of a call that nobody records: a compiled graph keeps its taps after the recorder is closed."""


HandOver = Callable[[Sequence[Tensor | None], Sequence[Tensor] | None], None]
"""Takes what a backward pass has brought: the gradients of outputs, and what was saved; None if that was changed in place."""


class CompiledCalls(Protocol):
    """Records the calls of modules in compiled graphs."""

    def open(self, module: int, key: Tensor, *, is_data: bool) -> int:
        """A module was called; return the number of the call."""

    def hand_over(self, call: int, error: Tensor, saved: Sequence[Tensor]) -> None:
        """A backward pass has reached a call."""


class Tap(torch.autograd.Function):
    """Returns aliases of its first tensors; saves the other ones."""

    @staticmethod
    def forward(ctx: Any, hand_over: HandOver, outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """outputs: how many of the tensors are outputs of the module."""
        ctx.set_materialize_grads(False)
        ctx.hand_over = hand_over
        ctx.save_for_backward(*tensors[outputs:])
        ctx.unused = (None,) * (len(tensors) - outputs)
        # Aliases and not views: autograd lets activations change them in place
        return tuple(tensor.detach() for tensor in tensors[:outputs])

    @staticmethod
    def backward(ctx: Any, *errors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Hand over the error signals, and pass them on as they are."""
        try:
            saved = ctx.saved_tensors
        except RuntimeError as problem:
            if "modified by an inplace operation" not in str(problem):
                raise
            saved = None
        ctx.hand_over(errors, saved)
        return (None, None, *errors, *ctx.unused)


def tap(hand_over: HandOver, outputs: Sequence[Tensor], saved: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Aliases of outputs whose gradients are handed over, with what was saved."""
    # Without their history: autograd would have to send gradients along it
    detached = [tensor.detach() for tensor in saved]
    aliases: tuple[Tensor, ...] = Tap.apply(hand_over, len(outputs), *outputs, *detached)  # type: ignore[no-untyped-call]
    return aliases


class CompiledTap(torch.autograd.Function):
    """The same inside a compiled graph, for a module with one output."""

    @staticmethod
    def forward(
        ctx: Any, recording: int, module: int, site: int, is_data: bool, output: Tensor, *saved: Tensor
    ) -> Tensor:
        """recording, module: their numbers; site: that of the tap; is_data: whether the key comes from data and not from another layer."""
        copy, call = open_call(output, saved[0], recording, module, site, is_data)
        ctx.recording = recording
        ctx.unused = (None,) * len(saved)
        ctx.save_for_backward(call, *saved)
        return copy  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *errors: Any) -> tuple[Tensor | None, ...]:
        """Hand over a copy of the error signal, and pass on another one."""
        call, *saved = ctx.saved_tensors
        copy = hand_over(errors[0], call, list(saved), ctx.recording)
        return (None, None, None, None, copy, *ctx.unused)


def compiled_tap(recording: int, module: int, output: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """The same for a compiler to trace."""
    is_data = not saved[0].requires_grad
    detached = [tensor.detach() for tensor in saved]
    copy: Tensor = CompiledTap.apply(recording, module, new_site(), is_data, output, *detached)  # type: ignore[no-untyped-call]
    return copy


_RECORDINGS: WeakValueDictionary[int, CompiledCalls] = WeakValueDictionary()
_NUMBERS = count()


def register(calls: CompiledCalls) -> int:
    """Give a recording a number, which compiled graphs know it by."""
    number = next(_NUMBERS)
    _RECORDINGS[number] = calls
    return number


def forget(recording: int) -> None:
    """The recording is closed."""
    _RECORDINGS.pop(recording, None)


_SITES = count()


def new_site() -> int:
    """A number for each tap of a graph: without it, the compiler may merge calls that look alike."""
    return next(_SITES)


# As torch.compiler.assume_constant_result does it: called while a graph is traced, not while it runs. That function would import
# the compiler, which takes seconds.
new_site._dynamo_marked_constant = True  # type: ignore[attr-defined]

# CUDA graphs replay kernels without running Python. Older versions of PyTorch do not know this tag.
_TAGS: dict[str, Any] = {"tags": [torch.Tag.cudagraph_unsafe]} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


@torch.library.custom_op(
    "dualform::open_call",
    mutates_args=(),
    schema="(Tensor output, Tensor key, int recording, int module, int site, bool is_data) -> (Tensor, Tensor)",
    **_TAGS,
)
def open_call(
    output: Tensor, key: Tensor, recording: int, module: int, site: int, is_data: bool
) -> tuple[Tensor, Tensor]:
    """A module was called in a compiled graph. Returns a copy of its output, and the number of the call."""
    calls = _RECORDINGS.get(recording)
    number = CLOSED if calls is None else calls.open(module, key, is_data=is_data)
    return output.clone(), torch.tensor(number)


@open_call.register_fake
def _(output: Tensor, key: Tensor, recording: int, module: int, site: int, is_data: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(output), torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "dualform::hand_over",
    mutates_args=(),
    schema="(Tensor error, Tensor call, Tensor[] saved, int recording) -> Tensor",
    **_TAGS,
)
def hand_over(error: Tensor, call: Tensor, saved: list[Tensor], recording: int) -> Tensor:
    """A compiled backward pass has reached a call. Returns a copy of its error signal."""
    calls = _RECORDINGS.get(recording)
    number = int(call)
    if calls is not None and number != CLOSED:
        calls.hand_over(number, error, saved)
    return error.clone()


@hand_over.register_fake
def _(error: Tensor, call: Tensor, saved: list[Tensor], recording: int) -> Tensor:
    return torch.empty_like(error)
