"""The linear maps inside a layer, each with its biases: which part of the key is multiplied by which part of the error signal.

The gradient of a map is Σ error ⊗ (key, constant) over its slots. Most layers are one map. A GRU is two, since its two weights see
different error signals; a grouped convolution is one for each group. The biases of a map are appended to its key as one constant,
√(number of biases), because equal gradients count twice in every inner product. An elementwise weight is a map without a key: the
slots' own parts take the place of error signals, and the key is the constant alone. Its bias is another such map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.layers.keys import Keys, OneHot, RowGradients, select_columns
from dualform.layers.layer import Layer, Use, spans


@dataclass(frozen=True)
class LinearMap:
    """One linear map inside a layer."""

    width: int
    """The length of its keys (in each group), without the constant."""
    outputs: int
    """The length of its error signals (in each group)."""
    constant: float
    """The number that is appended to each key; 0: there is no bias."""
    keys: tuple[int, ...] = ()
    """The columns of the layer's key (begin, end, …), if not all."""
    errors: tuple[int, ...] = ()
    """The columns of the layer's error signal (begin, end, …), if not all."""
    groups: int = 1
    is_one_hot: bool = False
    """Whether keys are one-hot, and given by the place of their one."""
    of_parts: bool = False
    """Whether the slots' own parts take the place of error signals (elementwise weights)."""

    def key_side(self, keys: Keys) -> Tensor:
        """Return the map's part of keys, (n, groups, width), without the constant; for one-hot keys their places, (n,)."""
        if self.is_one_hot:
            assert isinstance(keys, OneHot)
            return keys.places
        if not self.width:
            vectors = keys.vectors()
            return vectors.new_zeros(len(vectors), 1, 0)
        vectors = select_columns(keys.vectors(), self.keys)
        return vectors.reshape(len(vectors), self.groups, self.width)

    def error_side(self, keys: Keys, errors: Tensor) -> Tensor:
        """Return the map's part of error signals, (n, groups, outputs)."""
        vectors = keys.vectors() if self.of_parts else select_columns(errors, self.errors)
        return vectors.reshape(len(vectors), self.groups, self.outputs)

    def of_gradients(self, gradients: RowGradients) -> tuple[Tensor, Tensor]:
        """Return the map's part of row gradients: Σ error ⊗ key, (rows, groups, outputs, width), and Σ error, (rows, groups, outputs).

        The second is zero if there is no bias.
        """
        weights = select_columns(gradients.weights, self.keys)
        if self.errors:
            weights = select_columns(weights.transpose(1, 2), self.errors).transpose(1, 2)
        shape = (len(gradients), self.groups, self.outputs)
        weights = weights.reshape(*shape, self.width)
        if not self.constant:
            return weights, weights.new_zeros(shape)
        return weights, select_columns(gradients.biases, self.errors).reshape(shape)

    def with_constant(self, vectors: Tensor) -> Tensor:
        """Append the constant to each vector: (…, width) → (…, width + 1)."""
        constants = vectors.new_full((*vectors.shape[:-1], 1), self.constant)
        return torch.cat([vectors, constants], -1)


def linear_maps(layer: Layer) -> list[LinearMap]:
    """Return the linear maps inside a layer."""
    if layer.form == "parts":
        return _elementwise_maps(layer)
    uses_by_map: dict[tuple[tuple[int, ...], int], list[Use]] = {}
    for use in layer.bilinear():
        uses_by_map.setdefault((use.errors, use.groups), []).append(use)
    return [_map_of(layer, uses) for uses in uses_by_map.values()]


def _elementwise_maps(layer: Layer) -> list[LinearMap]:
    scales = [use for use in layer.uses if use.role == "scale"]
    of_scales = [LinearMap(0, layer.d_in, 1.0, of_parts=True) for _ in scales]
    of_biases = [LinearMap(0, layer.kept_outputs, 1.0) for _ in layer.biases()]
    return of_scales + of_biases


def _map_of(layer: Layer, uses: Sequence[Use]) -> LinearMap:
    """Return the map of those weights of a layer that see the same error signals."""
    errors = uses[0].errors
    groups = uses[0].groups
    columns: tuple[int, ...] = ()
    if all(use.keys for use in uses):
        columns = tuple(edge for use in uses for edge in use.keys)
    biases = [use for use in layer.biases() if use.errors == errors]
    return LinearMap(
        width=(_length(columns) or layer.d_in) // groups,
        outputs=(_length(errors) or layer.kept_outputs) // groups,
        constant=math.sqrt(len(biases)),
        keys=columns,
        errors=errors,
        groups=groups,
        is_one_hot=layer.form == "numbers",
    )


def _length(columns: tuple[int, ...]) -> int:
    return sum(end - begin for begin, end in spans(columns))
