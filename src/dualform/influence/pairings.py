"""Which keys meet which error signals: the linear maps inside a layer, each with its biases.

A layer's gradient falls into maps: Σ over slots of error ⊗ (key, constant). Most layers are one map; a GRU is two, for its two
weights see different error signals; a grouped convolution is one for each group. The biases of a map stand behind its key as one
constant: √(number of biases), for two equal gradients count twice in every inner product. An elementwise weight is a map without a
key: its slots' own parts stand in the place of error signals, and the constant is its key; so is its bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from dualform.layers.keys import Keys, Numbers, part
from dualform.layers.streams import Layer


@dataclass(frozen=True)
class Pairing:
    """One linear map inside a layer."""

    width: int
    """How long its keys are (in each group), without the constant."""
    outputs: int
    """How long its error signals are (in each group)."""
    constant: float
    """What stands behind each key; 0: there is no bias."""
    keys: tuple[int, ...] = ()
    """begin, end, … of the layer's key, if it is a part of it."""
    errors: tuple[int, ...] = ()
    """begin, end, … of the layer's error signal, if it is a part of it."""
    groups: int = 1
    numbers: bool = False
    """Whether keys are one-hot, by the place of their one."""
    of_parts: bool = False
    """Whether the slots' own parts stand in the place of error signals."""

    def key_side(self, keys: Keys) -> Tensor:
        """(n, groups, width), without the constant; of one-hot keys their places, (n,)."""
        if self.numbers:
            assert isinstance(keys, Numbers)
            return keys.places
        if not self.width:
            vectors = keys.vectors()
            return vectors.new_zeros(len(vectors), 1, 0)
        vectors = part(keys.vectors(), self.keys)
        return vectors.reshape(len(vectors), self.groups, self.width)

    def error_side(self, keys: Keys, errors: Tensor) -> Tensor:
        """(n, groups, outputs)."""
        found = keys.vectors() if self.of_parts else part(errors, self.errors)
        return found.reshape(len(found), self.groups, self.outputs)


def pairings(layer: Layer) -> list[Pairing]:
    """The linear maps inside a layer."""
    d_out = len(layer.outputs) or layer.d_out
    biases = [use for use in layer.uses if use.role == "bias"]
    if layer.form == "parts":
        scales = [Pairing(0, layer.d_in, 1.0, of_parts=True) for use in layer.uses if use.role == "scale"]
        return [*scales, *(Pairing(0, d_out, 1.0) for _ in biases)]
    found = []
    by_errors = dict.fromkeys((use.errors, use.groups) for use in layer.bilinear())
    for errors, groups in by_errors:
        mine = [use for use in layer.bilinear() if (use.errors, use.groups) == (errors, groups)]
        columns = tuple(n for use in mine for n in use.keys) if all(use.keys for use in mine) else ()
        width = _length(columns) or layer.d_in
        constant = math.sqrt(sum(use.errors == errors for use in biases))
        outputs = (_length(errors) or d_out) // groups
        numbers = layer.form == "numbers"
        found.append(Pairing(width // groups, outputs, constant, columns, errors, groups, numbers))
    return found


def _length(columns: tuple[int, ...]) -> int:
    return sum(columns[1::2]) - sum(columns[::2])
