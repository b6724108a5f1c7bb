"""The user's samples: inputs and labels by place, or by the columns that name a training sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.errors import QuestionError
from dualform.explorer.inputs import Inputs, NamedInputs

Key = tuple[Any, ...]
"""What names a training sample: its entries in the columns that `by` names."""


class Part:
    """Inputs, with labels if there are any: an array, a pair of arrays, or a dataset of inputs or (input, label) pairs.

    The inputs of a pair may also be a dictionary of tensors by argument, as tokenizers give them.
    """

    def __init__(self, data: Any, name: str = ""):
        self.name = name
        pair = isinstance(data, tuple) and len(data) == 2 and all(hasattr(one, "__getitem__") for one in data)
        self._inputs: Any = data[0] if pair else data
        if isinstance(self._inputs, Mapping):
            self._inputs = NamedInputs(self._inputs)
        self._labels: Any = data[1] if pair else None
        if not hasattr(self._inputs, "__getitem__") or not hasattr(self._inputs, "__len__"):
            raise QuestionError(
                f"samples are {type(data).__name__}; expected an array, a pair (inputs, labels), or a dataset with "
                f"__len__ and __getitem__."
            )
        if pair and hasattr(data[1], "__len__") and len(self._inputs) != len(data[1]):
            raise QuestionError(
                f"there are {len(self._inputs)} inputs and {len(data[1])} labels; expected as many of both."
            )

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def has_labels_apart(self) -> bool:
        """Whether labels can be read without their inputs."""
        return self._labels is not None

    def input(self, place: Any) -> Any:
        """One input, as the user gave it."""
        item = self._inputs[place]
        return item[0] if self._items_are_pairs(item) else item

    def label(self, place: Any) -> Any:
        """Its label as plain data; None if there is none."""
        if self._labels is not None:
            found = self._labels[place]
        else:
            item = self._inputs[place]
            if not self._items_are_pairs(item):
                return None
            found = item[1]
        return found.item() if isinstance(found, Tensor | np.generic) else found

    def _items_are_pairs(self, item: Any) -> bool:
        return self._labels is None and isinstance(item, tuple) and len(item) == 2

    def batch(self, places: Sequence[int]) -> Inputs:
        """Some inputs as the model takes them."""
        if isinstance(self._inputs, NamedInputs):
            return self._inputs[list(places)]
        if isinstance(self._inputs, Tensor):
            return self._inputs[torch.as_tensor(places, dtype=torch.long)]
        return torch.stack([torch.as_tensor(self.input(place)) for place in places])


class TestSet:
    """All test examples in one row: of one dataset, or of several by name, one after the other."""

    __test__ = False  # for pytest

    def __init__(self, data: Any):
        named = data.items() if isinstance(data, Mapping) else [] if data is None else [("", data)]
        self.parts = [Part(part, str(name)) for name, part in named]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def place(self, number: int) -> tuple[Part, int]:
        """The dataset of a test example, and its place there."""
        if not 0 <= number < len(self):
            raise QuestionError(f"there is no test example {number}; there are {len(self)}, from 0 on.")
        for part in self.parts:
            if number < len(part):
                break
            number -= len(part)
        return part, number

    def batches(self, size: int, end: int) -> list[tuple[Part, range]]:
        """Stretches of at most `size` examples, together the first `end`."""
        found, left = [], end
        for part in self.parts:
            count = min(len(part), left)
            found += [(part, range(low, min(low + size, count))) for low in range(0, count, size)]
            left -= count
        return found


class TrainingSet:
    """Training samples by their key; with several columns, dictionaries of datasets: train["mnist"][7]."""

    def __init__(self, data: Any):
        self._data = data
        self._parts: dict[Key, Part] = {}

    def __bool__(self) -> bool:
        return self._data is not None

    def input(self, key: Key) -> Any:
        """The input of a training sample; None if it is not at hand."""
        if self._data is None:
            return None
        above, place = key[:-1], key[-1]
        if isinstance(place, int) and place < 0:
            return None  # Python would count from the end
        try:
            if above not in self._parts:
                data = self._data
                for name in above:
                    data = data[name]
                self._parts[above] = Part(data)
            return self._parts[above].input(place)
        except (IndexError, KeyError):
            return None
