"""How many slots, and how large, a forward pass leaves in each layer: found by running the model on inputs of any content, on the meta device too."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QuestionError
from dualform.layers.layer import Layer, joined
from dualform.layers.rules import Rule, rule_for
from dualform.layers.slot_source import LayerSlots
from dualform.record.choose import ChosenModule


@dataclass
class LayerSizes:
    """The slots of one layer in a forward pass of some rows."""

    layer: Layer
    slots: float = 0.0
    """How many, of all rows."""
    keys: float = 0.0
    """How many vectors are stored as keys: as many as slots, or feature maps."""
    key_numbers: float = 0.0
    """How many numbers these have together."""
    most_slots: float = 0.0
    """How many slots the largest call has."""
    calls: int = 0
    is_data: bool = False
    """Whether the keys come from data: equal ones are then stored once."""
    shares_keys: bool = False
    """Whether an earlier layer stores the same keys."""
    distinct: int | None = None
    """How many different numbers a row of an embedding has at most; None: it is not known."""

    def per_row(self, rows: int) -> LayerSizes:
        """The same of one row."""
        return LayerSizes(
            self.layer,
            self.slots / rows,
            self.keys / rows,
            self.key_numbers / rows,
            self.most_slots / rows,
            self.calls,
            self.is_data,
            self.shares_keys,
            self.distinct,
        )


@dataclass
class _Observer:
    """Takes note of the calls of recorded modules."""

    rows: int
    is_real: bool
    """Whether the inputs are such as the training has."""
    sizes: dict[str, LayerSizes] = field(default_factory=dict)
    seen: dict[Hashable, Tensor] = field(default_factory=dict)
    """The inputs of layers whose keys are vectors; held, so that no other tensor gets their memory."""

    def add(self, chosen: ChosenModule, found: LayerSlots, source: Tensor | None, *, is_data: bool) -> None:
        """A layer was called. source: the tensor that its keys are, if it is known."""
        name = joined(chosen.name, found.layer)
        [layer] = [layer for layer in chosen.layers if layer.name == name]
        sizes = self.sizes.setdefault(name, LayerSizes(layer))
        leading = found.keys.dim() - 1 if found.lead is None else found.lead
        vectors = found.keys.shape[:leading].numel()
        slots = vectors
        numbers = layer.d_in
        if layer.geometry is not None:
            size = tuple(found.keys.shape[leading + 1 :])
            slots = vectors * torch.Size(layer.geometry.positions(size)).numel()
            numbers = found.keys.shape[leading:].numel()
        if layer.form == "numbers":
            numbers = 1
            sizes.distinct = self._most_distinct(found.keys)
        sizes.slots += slots
        sizes.keys += vectors
        sizes.key_numbers += vectors * numbers
        sizes.most_slots = max(sizes.most_slots, slots)
        sizes.calls += 1
        sizes.is_data |= is_data and layer.form == "vectors" and layer.kind == "linear"
        if layer.form == "vectors" and source is not None:
            sizes.shares_keys = self._was_seen(source)

    def _most_distinct(self, keys: Tensor) -> int | None:
        """How many different numbers a row has at most."""
        if not self.is_real or keys.is_meta or keys.numel() % self.rows:
            return None
        by_row = keys.reshape(self.rows, -1)
        return max((len(row.unique()) for row in by_row), default=0)

    def _was_seen(self, tensor: Tensor) -> bool:
        """Whether another layer had the same input."""
        memory: Hashable = id(tensor)
        if not tensor.is_meta:
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        is_known = memory in self.seen
        self.seen.setdefault(memory, tensor)
        return is_known


def layer_sizes(
    model: nn.Module, modules: Sequence[ChosenModule], inputs: Any, rows: int, *, is_real: bool
) -> list[LayerSizes]:
    """Run a model once, in evaluation mode, and return the sizes of all layers that were called.

    inputs: a tensor, a tuple of arguments, or a dictionary of them, of so many rows. is_real: whether they are such as the training has.
    """
    observer = _Observer(rows, is_real)
    handles = []
    for chosen in modules:
        rule = rule_for(chosen.module)
        assert rule is not None
        handles.append(chosen.module.register_forward_hook(_hook(observer, chosen, rule), with_kwargs=True))
    try:
        with _evaluation_mode(model), torch.enable_grad():
            _call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return list(observer.sizes.values())


def _hook(observer: _Observer, chosen: ChosenModule, rule: Rule) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module is not chosen.module:
            return
        if rule.replay is None:
            assert rule.saved is not None
            assert rule.slots is not None
            saved = rule.saved(module, (args, kwargs))
            found = rule.slots(module, saved, None)
            source = saved[0] if len(saved) == 1 else None
            is_data = not saved[0].requires_grad
        else:
            slot_source = rule.slot_source(module, (args, kwargs), output, None)
            found = slot_source.keys() if slot_source.keys is not None else slot_source.slots(None)
            source = None
            is_data = not slot_source.key.requires_grad
        for one in found:
            observer.add(chosen, one, source, is_data=is_data)

    return note


def _begin_hook(begin: Callable[[nn.Module], Any]) -> Callable[..., None]:
    return lambda module, args: begin(module) and None


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Running statistics stay what they are, and no random numbers are drawn."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def _call(model: nn.Module, inputs: Any) -> None:
    try:
        if isinstance(inputs, dict):
            model(**inputs)
        elif isinstance(inputs, (tuple, list)):
            model(*inputs)
        else:
            model(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise QuestionError(
            f"the model did not run on the example: {type(error).__name__}: {error}. Give example=, a batch of inputs as the training has "
            f"them (a tensor, a tuple of arguments or a dictionary of them); of a model of tokens, positions= will do."
        ) from error
