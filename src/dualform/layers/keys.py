"""The forms of keys, and the few products that are needed of them. Each form stands for a matrix (slots, d_in).

`Vectors` is that matrix, and documents the products. `OneHot` and `Patches` compute the same products without building the matrix.
`RowGradients` replace keys and error signals where the slots of each row were summed while recording.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dualform.layers.layer import Geometry, Layer, Use, spans

Columns = Sequence[int]
"""begin, end, begin, end … of some columns; empty: all of them."""


def select_columns(tensor: Tensor, columns: Columns) -> Tensor:
    """Return some columns of a tensor, side by side; a view if they are next to each other."""
    if not columns:
        return tensor
    pieces = [tensor[..., begin:end] for begin, end in spans(columns)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def in_groups(tensor: Tensor, groups: int) -> Tensor:
    """(n, d) → (n, groups, d / groups)."""
    count, width = tensor.shape
    return tensor.reshape(count, groups, width // groups)


class Vectors:
    """Keys that are stored as vectors."""

    def __init__(self, data: Tensor):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def project(self, random: Tensor, columns: Columns = (), groups: int = 1) -> Tensor:
        """Return keys @ random, (n, k); with groups, for each group, (n, groups, k)."""
        data = select_columns(self.data, columns)
        if groups == 1:
            return data @ random
        return in_groups(data, groups) @ random

    def outer(self, errors: Tensor, columns: Columns = (), groups: int = 1) -> Tensor:
        """Return Σ error ⊗ key over the slots, (d_out, d_in / groups)."""
        data = select_columns(self.data, columns)
        if groups == 1:
            return errors.T @ data
        errors_by_group = in_groups(errors, groups).permute(1, 2, 0)
        keys_by_group = in_groups(data, groups).transpose(0, 1)
        return (errors_by_group @ keys_by_group).flatten(0, 1)

    def dot(self, queries: Tensor, columns: Columns = ()) -> Tensor:
        """Return query · key, (queries, n)."""
        keys = select_columns(self.data, columns)
        return select_columns(queries, columns) @ keys.T

    def vectors(self) -> Tensor:
        """Return the keys, (n, d_in)."""
        return self.data

    def squared(self) -> Vectors:
        """Return the keys with each number squared."""
        return Vectors(self.data.square())

    def square_norms(self) -> Tensor:
        """‖key‖², (n,)."""
        return self.data.square().sum(1)

    def to(self, dtype: torch.dtype) -> Vectors:
        """Return the same keys in another type."""
        return Vectors(self.data.to(dtype))

    def select(self, which: Tensor | slice) -> Vectors:
        """Return the keys of some slots, given by their places."""
        if isinstance(which, slice):
            return Vectors(self.data[which])
        return Vectors(self.data.index_select(0, which))


class OneHot:
    """One-hot keys, given by the place of their one; −1 is a key of zeros."""

    def __init__(self, places: Tensor, d_in: int, dtype: torch.dtype):
        self.places = places.reshape(-1).long()
        self._d_in = d_in
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self.places)

    def project(self, random: Tensor, columns: Columns = (), groups: int = 1) -> Tensor:
        """keys @ random."""
        return random[self.places]

    def outer(self, errors: Tensor, columns: Columns = (), groups: int = 1) -> Tensor:
        """Σ error ⊗ key."""
        d_out = errors.shape[1]
        table = errors.new_zeros(self._d_in, d_out)
        return table.index_add_(0, self.places, errors).T

    def dot(self, queries: Tensor, columns: Columns = ()) -> Tensor:
        """query · key; queries are places too, or vectors."""
        if queries.shape[-1] == self._d_in > 1:
            return queries[..., self.places].to(self._dtype)
        is_equal = queries.reshape(-1, 1).long() == self.places
        return is_equal.to(self._dtype)

    def vectors(self) -> Tensor:
        """The keys themselves."""
        one_hot = F.one_hot(self.places, self._d_in)
        return one_hot.to(self._dtype)

    def squared(self) -> OneHot:
        """Return the same keys: 1² is 1."""
        return self

    def square_norms(self) -> Tensor:
        """‖key‖²."""
        return (self.places >= 0).to(self._dtype)

    def to(self, dtype: torch.dtype) -> OneHot:
        """Return the same keys in another type."""
        return OneHot(self.places, self._d_in, dtype)

    def select(self, which: Tensor | slice) -> OneHot:
        """Return the keys of some slots."""
        return OneHot(self.places[which], self._d_in, self._dtype)


class Patches:
    """Keys of convolutions: the patches of feature maps (n, channels, *size) that each output was computed from."""

    def __init__(self, maps: Tensor, geometry: Geometry):
        self.geometry = geometry
        self.size = tuple(maps.shape[2:])
        self.maps = _with_border(maps, geometry)

    def __len__(self) -> int:
        positions = self.geometry.positions(self.size)
        return len(self.maps) * math.prod(positions)

    def project(self, random: Tensor, columns: Columns = (), groups: int = 1) -> Tensor:
        """keys @ random: a convolution."""
        geometry = self.geometry
        axes = len(self.size)
        count = random.shape[1]
        of_one_group = random.T.reshape(count, geometry.channels // groups, *geometry.kernel)
        filters = of_one_group.repeat(groups, *[1] * (1 + axes))
        convolution = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
        products = convolution(self.maps, filters, None, geometry.stride, 0, geometry.dilation, groups).flatten(2)
        positions = products.shape[2]
        by_group = products.reshape(len(self.maps), groups, count, positions)
        by_position = by_group.permute(0, 3, 1, 2)
        if groups == 1:
            return by_position.reshape(-1, count)
        return by_position.reshape(-1, groups, count)

    def outer(self, errors: Tensor, columns: Columns = (), groups: int = 1) -> Tensor:
        """Σ error ⊗ key: the gradient of a convolution's weight."""
        geometry = self.geometry
        d_out = errors.shape[1]
        if not len(errors):
            return errors.new_zeros(d_out, geometry.patch // groups)
        positions = geometry.positions(self.size)
        by_map = errors.reshape(len(self.maps), math.prod(positions), d_out).transpose(1, 2)
        error_maps = by_map.reshape(len(self.maps), d_out, *positions)
        weight = errors.new_empty(d_out, geometry.channels // groups, *geometry.kernel)
        return self._weight_gradient(self.maps, error_maps, weight, groups).flatten(1)

    def _weight_gradient(self, maps: Tensor, error_maps: Tensor, weight: Tensor, groups: int) -> Tensor:
        """The gradient of a convolution's weight, shaped like it."""
        no_padding = [0] * len(self.size)
        gradients: Sequence[Tensor] = torch.ops.aten.convolution_backward(
            error_maps.contiguous(),
            maps,
            weight,
            None,
            self.geometry.stride,
            no_padding,
            self.geometry.dilation,
            False,  # not transposed
            no_padding,
            groups,
            [False, True, False],  # of input, weight and bias, only the weight's gradient
        )
        return gradients[1]

    def outer_by_row(self, errors: Tensor, groups: int) -> Tensor:
        """Return Σ error ⊗ key over the slots of each row, (rows, d_out × d_in / groups). errors (rows, positions, d_out).

        The maps of all rows are stacked as the channels of one map. Each row is then a group of a convolution, which needs no patches.
        """
        geometry = self.geometry
        rows, _, d_out = errors.shape
        maps_a_row = len(self.maps) // rows
        own_maps = torch.unflatten(self.maps, 0, (rows, maps_a_row))
        own_errors = torch.unflatten(errors, 1, (maps_a_row, *geometry.positions(self.size)))
        stacked_maps = own_maps.transpose(0, 1).flatten(1, 2)
        stacked_errors = own_errors.movedim(-1, 2).transpose(0, 1).flatten(1, 2)
        weight = errors.new_empty(rows * d_out, geometry.channels // groups, *geometry.kernel)
        return self._weight_gradient(stacked_maps, stacked_errors, weight, rows * groups).reshape(rows, -1)

    def dot(self, queries: Tensor, columns: Columns = ()) -> Tensor:
        """query · key."""
        return Vectors(self.vectors()).dot(queries, columns)

    def vectors(self) -> Tensor:
        """The patches, (n, channels × kernel)."""
        geometry = self.geometry
        axes = len(self.size)
        patches = self.maps  # (maps, channels, *positions, *kernel) in the end
        for axis, span in enumerate(geometry.reach):
            stride = geometry.stride[axis]
            dilation = geometry.dilation[axis]
            patches = patches.unfold(2 + axis, span, stride)[..., ::dilation]
        positions = range(2, 2 + axes)
        kernel = range(2 + axes, 2 + 2 * axes)
        return patches.permute(0, *positions, 1, *kernel).reshape(-1, geometry.patch)

    def squared(self) -> Patches:
        """Return the keys with each number squared."""
        return self._with(self.maps.square())

    def square_norms(self) -> Tensor:
        """‖key‖²."""
        ones = self.maps.new_ones(self.geometry.patch, 1)
        return self.squared().project(ones)[:, 0]

    def to(self, dtype: torch.dtype) -> Patches:
        """Return the same keys in another type."""
        return self._with(self.maps.to(dtype))

    def _with(self, maps: Tensor) -> Patches:
        """Return the patches of other maps, which have their border already."""
        patches = copy.copy(self)
        patches.maps = maps
        return patches


class RowGradients:
    """The gradients of whole rows, Σ error ⊗ key over the slots of each row. A row then counts as one slot with the error signal 1.

    There are no single keys and error signals any more: `added_to(use)` returns what each row adds to a parameter.
    """

    def __init__(self, data: Tensor, outputs: int, width: int):
        """data (rows, outputs × width), and, if there is a bias, its gradient (outputs) behind that.

        outputs: how many numbers of an error signal were kept; width: the length of a row of the weight, d_in / groups.
        """
        self.data = data
        self._outputs = outputs
        self._width = width

    @staticmethod
    def of(layer: Layer, data: Tensor) -> RowGradients:
        """Gradients (rows, size) of a layer."""
        return RowGradients(data, layer.kept_outputs, layer.gradient_width)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def weights(self) -> Tensor:
        """Σ error ⊗ key of each row, (rows, outputs, width)."""
        shape = (self._outputs, self._width)
        own = self.data[:, : self._outputs * self._width]
        return torch.unflatten(own, 1, shape)

    @property
    def biases(self) -> Tensor:
        """Σ error of each row, (rows, outputs)."""
        return self.data[:, self._outputs * self._width :]

    def added_to(self, use: Use, outputs: Tensor | None = None) -> Tensor:
        """Return what each row adds to a parameter, (rows, *its rows and columns). outputs: only these outputs of a weight."""
        if use.role == "bias":
            return select_columns(self.biases, use.errors)
        weights = self.weights
        if outputs is not None:
            weights = weights[:, outputs]
        elif use.errors:
            by_output = weights.transpose(1, 2)
            weights = select_columns(by_output, use.errors).transpose(1, 2)
        weights = select_columns(weights, use.keys)
        return weights.transpose(1, 2) if use.role == "table" else weights

    def summed(self, use: Use, scales: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Return Σ scale · what each row adds to a parameter. scales (rows,)."""
        total = scales.unsqueeze(0) @ self.data
        return RowGradients(total, self._outputs, self._width).added_to(use, outputs)[0]

    def along(self, use: Use, product: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Return ⟨product, what each row adds to a parameter⟩, (examples, rows). product (examples, *shape of the parameter)."""
        added = self.added_to(use, outputs).flatten(1)
        return product.reshape(len(product), added.shape[1]) @ added.T

    def squared(self) -> RowGradients:
        """Return the keys with each number squared."""
        return RowGradients(self.data.square(), self._outputs, self._width)

    def square_norms(self) -> Tensor:
        """‖gradient‖², (rows,)."""
        return self.data.square().sum(1)

    def to(self, dtype: torch.dtype) -> RowGradients:
        """Return the same gradients in another type."""
        return RowGradients(self.data.to(dtype), self._outputs, self._width)

    def select(self, which: Tensor | slice) -> RowGradients:
        """Return the gradients of some rows, given by their places."""
        return RowGradients(self.data[which], self._outputs, self._width)


Keys = Vectors | OneHot | Patches
"""Keys of some slots."""
KeysOrGradients = Keys | RowGradients
"""Keys of some slots, or gradients of some rows."""


def _with_border(maps: Tensor, geometry: Geometry) -> Tensor:
    if not any(geometry.padding):
        return maps
    pads: list[int] = []
    for before, after in spans(geometry.padding):
        pads = [before, after, *pads]  # F.pad wants the last axis first
    is_constant = geometry.mode == "zeros" or not maps.numel()  # other modes refuse empty maps
    return F.pad(maps, pads, mode="constant" if is_constant else geometry.mode)


def keys_of(layer: Layer, stored: Tensor, size: Sequence[int], dtype: torch.dtype) -> Keys:
    """Return stored keys in their form. stored: one row per key, decoded; size: of each feature map; dtype: the type to compute in."""
    if layer.form == "numbers":
        return OneHot(stored, layer.d_in, dtype)
    if layer.geometry is None:
        return Vectors(stored)
    maps = stored.reshape(-1, layer.geometry.channels, *size)
    return Patches(maps, layer.geometry)
