"""Run a copy of a module, without consequences for the training, and note the inputs of its recorded layers.

Three guards make sure of that. What runs are copies (`layers/module_copy.py`) with copies of the arguments. Calling an original module, or
writing to the memory of an original parameter or buffer, raises an error before it happens. Random states are restored.

Dropout is off even in training mode: its masks stay in place when rows move, and would hide which row is where.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from dualform.errors import DualformError
from dualform.layers.layer import joined
from dualform.layers.module_copy import Copier
from dualform.layers.rows import Fingerprints, Lead, fingerprints
from dualform.layers.rules import Rule, rule_for
from dualform.layers.slot_source import Arguments, LayerSlots

SHUFFLING_SEED = 2
"""A model may shuffle its rows. With this seed, random.shuffle and np.random.permutation move even a few rows."""
_SORTING = {"sort", "topk"}
"""Operators that may reorder rows by their content, along one axis; they return values and indices."""
_SELECTING = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim"}
"""Operators that may select rows by their content."""


_ONE_AT_A_TIME = threading.RLock()
"""Held while random states and settings of PyTorch are changed, which are global."""


class WouldChangeTrainingError(DualformError, RuntimeError):
    """Running a copy of a module would change the training."""


@dataclass(frozen=True)
class Input:
    """The input of one call of a layer."""

    lead: Lead
    axis: int | None
    """The leading axis of the rows, if the module itself names it."""
    numbers: Fingerprints
    is_coarse: bool = False
    """Whether it may have been computed in 16 bits."""
    ordered_by: str = ""
    """The last operator before this call that may have ordered or selected rows by their content, if any."""


@dataclass
class Calls:
    """The inputs of all layers in one run of the model, by layer, in the order of their calls."""

    by_layer: dict[str, list[Input]] = field(default_factory=dict)

    def add(self, layer: str, found: LayerSlots, ordered_by: str) -> None:
        """Note a call of a layer."""
        shown = found.keys if found.shown is None else found.shown
        lead = shown.dim() - 1 if found.lead is None else found.lead
        shape = tuple(shown.shape[:lead])
        given = Input(shape, found.axis, fingerprints(shown, lead), _is_coarse(shown), ordered_by)
        self.by_layer.setdefault(layer, []).append(given)


def _is_coarse(keys: Tensor) -> bool:
    device = keys.device.type
    is_autocast = torch.is_autocast_enabled(device)
    return keys.dtype in (torch.float16, torch.bfloat16) or is_autocast or device != "cpu"


def rehearse(
    module: nn.Module, arguments: Arguments, recorded: Mapping[str, nn.Module], rows: int, *, evaluating: bool
) -> Calls:
    """Run a copy of a module; return the inputs of its recorded layers.

    recorded: modules by name. rows: of the batch. evaluating: in evaluation mode; otherwise in the mode that the module is in.
    """
    copier = Copier()  # a new one for each run: modules may count their calls
    copied = copier.copy(module)
    for inner in copied.modules():  # not .eval(), which some modules use to change their weights
        inner.training = inner.training and not evaluating
    watching = _Watching(_memory_of(module), rows)
    calls = Calls()
    for name, original in recorded.items():
        rule = rule_for(original)
        if rule is not None and id(original) in copier.modules:
            _hook(copier.modules[id(original)], rule, name, calls, watching)
    positional, named = copier.copy(arguments)
    with (
        _ONE_AT_A_TIME,
        _same_random_numbers(module),
        _uncalled(set(copier.modules)),
        _without_autocast_cache(),
        watching.operators(),
    ):
        copied(*positional, **named)
    return calls


def _hook(module: nn.Module, rule: Rule, name: str, calls: Calls, watching: _Watching) -> None:
    begun: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        begun[:] = [rule.begin(module) if rule.begin else None]

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        source = rule.slot_source(module, (args, kwargs), output, begun.pop() if begun else None)
        for found in source.slots(None):
            calls.add(joined(name, found.layer), found, watching.ordered_by)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, with_kwargs=True)


def _memory_of(module: nn.Module) -> set[int]:
    """Return the addresses of parameters and buffers in memory."""
    tensors = [*module.parameters(), *module.buffers()]
    return {address for tensor in tensors if (address := _address(tensor))}


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and others without a storage
        return 0


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operator: refuses those that would write to protected memory, notes those that order rows by content.

    Random masks, as dropout draws them, become masks of ones, and random orders are never the trivial one.
    """

    def __init__(self, protected: set[int], rows: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self._protected = protected
        self._rows = rows
        self.ordered_by = ""
        """The last operator that may have ordered or selected rows by their content."""
        self._generators: dict[torch.Generator, Tensor] = {}
        """The state in which the operators have found each generator."""

    @contextlib.contextmanager
    def operators(self) -> Iterator[None]:
        """Watch the operators within a with statement, without gradients."""
        depth = len(_get_current_dispatch_mode_stack())
        with_gradients = torch.is_grad_enabled()
        try:
            with torch.no_grad(), self:
                yield
        finally:
            # An exception from outside that comes just as a with statement ends leaves undone what it should undo
            while len(_get_current_dispatch_mode_stack()) > depth:
                _pop_mode()
            torch.set_grad_enabled(with_gradients)
            for generator, state in self._generators.items():
                generator.set_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        self._refuse_writes(func, args, named)
        generator = named.get("generator")
        if generator is not None and generator not in self._generators:
            self._generators[generator] = generator.get_state()
        name = _name_of(func)
        if self._selects_rows(func, args):
            self.ordered_by = name
        output = _run(func, args, named)
        if name in _SORTING and self._might_sort_rows(output[1], _argument(func, args, named, "dim")):
            self.ordered_by = name
        return output

    def _refuse_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in _written(func, args, kwargs):
            if _address(tensor) in self._protected:
                raise WouldChangeTrainingError(f"its forward pass writes to a parameter or buffer ({func})")

    def _might_sort_rows(self, indices: Tensor, axis: int) -> bool:
        """Whether rows may have been sorted that were in order already. Where they were not, the experiment shows what becomes of that."""
        if not indices.dim() or not self._may_be_rows(indices.shape[axis]) or _is_packing():
            return False
        in_order = torch.arange(indices.shape[axis], device=indices.device)
        return bool((indices.movedim(axis, -1) == in_order).all())

    def _selects_rows(self, func: Any, args: Any) -> bool:
        name = _name_of(func)
        if name in _SELECTING:
            return any(map(self._may_be_rows, args[0].shape))
        if name == "index":  # x[mask]
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            return any(self._may_be_rows(size) for mask in masks for size in mask.shape)
        return False

    def _may_be_rows(self, size: int) -> bool:
        return size > 0 and size % self._rows == 0


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator, but with random masks of ones, and with random orders that are never the trivial one."""
    name = _name_of(func)
    if name == "bernoulli_":
        return args[0].fill_(1)
    if name == "bernoulli":
        return torch.ones_like(args[0])
    if name == "randperm":  # it could be any order, so not the one that changes nothing
        return func(*args, **kwargs).sort().values.roll(1)
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    return func(*_without_dropout(func, args), **kwargs)


def _is_packing() -> bool:
    """Whether PyTorch is packing sequences: it sorts them by their lengths, and recurrent layers undo that."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_code.co_filename == torch.nn.utils.rnn.__file__:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


@cache
def _name_of(func: Any) -> str:
    name: str = func._schema.name.removeprefix("aten::")
    return name


@cache
def _place_of(func: Any, name: str) -> int | None:
    """Where an operator takes an argument; None if it does not."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index(name) if name in names else None


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value of an operator's argument."""
    place = _place_of(func, name)
    if place is None:
        return None
    if place < len(args):
        return args[place]
    return kwargs.get(name, func._schema.arguments[place].default_value)


def _without_dropout(func: Any, args: Any) -> Any:
    """The arguments of an operator that has dropout built in (attention), without it."""
    place = _place_of(func, "dropout_p")
    if place is None or place >= len(args):
        return args
    return (*args[:place], 0.0, *args[place + 1 :])


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    written = [
        (place, argument.name)
        for place, argument in arguments
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in ("running_mean", "running_var")  # the schemas of batch normalisations do not say so
    ]
    return tuple(written)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for place, name in _written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (inner for inner in value if isinstance(inner, Tensor))


@contextlib.contextmanager
def _uncalled(originals: set[int]) -> Iterator[None]:
    """Refuse calls of original modules within a with statement. originals: their ids."""
    rehearsal = sys._getframe(2)  # the function that has the with statement

    def refuse(module: nn.Module, args: Any) -> None:
        # Ctrl-C may come just before the hook is removed: it must not refuse anything later
        if id(module) in originals and _is_running(rehearsal):
            raise WouldChangeTrainingError(
                f"its forward pass calls a {type(module).__name__} by a reference that cannot be copied"
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _is_running(function: FrameType) -> bool:
    """Whether a call of a function has led to this one, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not function:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Autocast remembers cast weights: those cast without gradients would be used by the training too."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _same_random_numbers(module: nn.Module) -> Iterator[None]:
    """Always draw the same random numbers, and put all random states back afterwards."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    restore_own = _restore_generators(module)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    devices = {parameter.device for parameter in module.parameters()}
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    random.seed(SHUFFLING_SEED)
    np.random.seed(SHUFFLING_SEED)
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no inner modules
    try:
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(SHUFFLING_SEED)  # other threads may draw between two runs
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for restore in restore_own:
            restore()


def _restore_generators(module: nn.Module) -> list[Callable[[], None]]:
    """Functions that put generators of NumPy and Python back into the state that they are in now.

    Those are found that the model's code has as global variables or class attributes; what modules hold themselves is copied.
    """
    restorers = map(_restorer, _values_of_code(module))
    return [restore for restore in restorers if restore is not None]


def _values_of_code(module: nn.Module) -> list[object]:
    """The class attributes of modules and the global variables beside them, each once."""
    classes = {kind for inner in module.modules() for kind in type(inner).__mro__}
    own = [kind for kind in classes if not kind.__module__.startswith(("torch.", "builtins"))]
    files = {kind.__module__ for kind in own} & sys.modules.keys()
    namespaces = [*map(vars, own), *(vars(sys.modules[name]) for name in files)]
    values = {id(value): value for namespace in namespaces for value in list(namespace.values())}
    return list(values.values())


def _restorer(value: object) -> Callable[[], None] | None:
    """A function that puts a generator back into the state that it is in now; None if the value is no generator."""
    if type(value) is random.Random:
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return None
