"""The forms of keys, with the few products that are ever asked of them. All are (slots, d_in) in spirit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dualform.layers.streams import Geometry, Layer


class Keys(Protocol):
    """Keys of some slots."""

    def __len__(self) -> int: ...

    def project(self, random: Tensor, columns: Sequence[int] = (), groups: int = 1) -> Tensor:
        """keys @ random, (n, k), or for each group (n, groups, k)."""

    def outer(self, errors: Tensor, columns: Sequence[int] = (), groups: int = 1) -> Tensor:
        """Σ error ⊗ key over the slots, (d_out, d_in / groups)."""

    def dot(self, queries: Tensor, columns: Sequence[int] = ()) -> Tensor:
        """query · key, (queries, n)."""

    def vectors(self) -> Tensor:
        """The keys themselves, (n, d_in)."""

    def squared(self) -> Keys:
        """Each number squared."""

    def square_norms(self) -> Tensor:
        """‖key‖², (n,)."""

    def to(self, dtype: torch.dtype) -> Keys:
        """The same keys in another type of numbers."""


def part(tensor: Tensor, ranges: Sequence[int]) -> Tensor:
    """Some columns, given by where they begin and end."""
    if not ranges:
        return tensor
    pieces = [tensor[..., low:high] for low, high in zip(ranges[::2], ranges[1::2], strict=True)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def in_groups(tensor: Tensor, groups: int) -> Tensor:
    """(n, d) → (n, groups, d / groups)."""
    return tensor.reshape(len(tensor), groups, tensor.shape[1] // groups)


class Vectors:
    """Keys as they are."""

    def __init__(self, data: Tensor):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def project(self, random: Tensor, columns: Sequence[int] = (), groups: int = 1) -> Tensor:
        """keys @ random."""
        data = part(self.data, columns)
        return data @ random if groups == 1 else in_groups(data, groups) @ random

    def outer(self, errors: Tensor, columns: Sequence[int] = (), groups: int = 1) -> Tensor:
        """Σ error ⊗ key."""
        data = part(self.data, columns)
        if groups == 1:
            return errors.T @ data
        apart = in_groups(errors, groups).permute(1, 2, 0) @ in_groups(data, groups).transpose(0, 1)
        return apart.reshape(errors.shape[1], data.shape[1] // groups)

    def dot(self, queries: Tensor, columns: Sequence[int] = ()) -> Tensor:
        """query · key."""
        return part(queries, columns) @ part(self.data, columns).T

    def vectors(self) -> Tensor:
        """The keys themselves."""
        return self.data

    def squared(self) -> Vectors:
        """Each number squared."""
        return Vectors(self.data.square())

    def square_norms(self) -> Tensor:
        """‖key‖²."""
        return self.data.square().sum(1)

    def to(self, dtype: torch.dtype) -> Vectors:
        """The same keys in another type of numbers."""
        return Vectors(self.data.to(dtype))

    def some(self, which: Tensor | slice) -> Vectors:
        """Those of some slots, by their places."""
        return Vectors(self.data[which] if isinstance(which, slice) else self.data.index_select(0, which))


class Numbers:
    """One-hot keys, by the place of their one; −1 stands for a key of zeros."""

    def __init__(self, places: Tensor, d_in: int, dtype: torch.dtype):
        self.places, self._d_in, self._dtype = places.reshape(-1).long(), d_in, dtype

    def __len__(self) -> int:
        return len(self.places)

    def project(self, random: Tensor, columns: Sequence[int] = (), groups: int = 1) -> Tensor:
        """keys @ random."""
        return random[self.places]

    def outer(self, errors: Tensor, columns: Sequence[int] = (), groups: int = 1) -> Tensor:
        """Σ error ⊗ key."""
        return torch.zeros(self._d_in, errors.shape[1], dtype=errors.dtype).index_add_(0, self.places, errors).T

    def dot(self, queries: Tensor, columns: Sequence[int] = ()) -> Tensor:
        """query · key; queries are numbers too, or vectors."""
        if queries.shape[-1] == self._d_in > 1:
            return queries[..., self.places].to(self._dtype)
        return (queries.reshape(-1, 1).long() == self.places).to(self._dtype)

    def squared(self) -> Numbers:
        """Each number squared: ones stay ones."""
        return self

    def square_norms(self) -> Tensor:
        """‖key‖²."""
        return (self.places >= 0).to(self._dtype)

    def to(self, dtype: torch.dtype) -> Numbers:
        """The same keys in another type of numbers."""
        return Numbers(self.places, self._d_in, dtype)

    def some(self, which: Tensor | slice) -> Numbers:
        """Those of some slots."""
        return Numbers(self.places[which], self._d_in, self._dtype)

    def vectors(self) -> Tensor:
        """The keys themselves."""
        return F.one_hot(self.places, self._d_in).to(self._dtype)


class Maps:
    """Patches of feature maps (n, channels, *size): the key of a slot is the patch that its output was computed from."""

    def __init__(self, maps: Tensor, geometry: Geometry):
        self.geometry, self.size = geometry, tuple(maps.shape[2:])
        axes = len(self.size)
        pads = [n for axis in reversed(range(axes)) for n in geometry.padding[2 * axis : 2 * axis + 2]]
        if any(pads):
            mode = "constant" if geometry.mode == "zeros" else geometry.mode
            maps = F.pad(maps, pads, mode=mode) if maps.numel() else maps.new_zeros(
                *maps.shape[:2], *(n + geometry.padding[2 * i] + geometry.padding[2 * i + 1] for i, n in enumerate(self.size))
            )  # fmt: skip
        self.maps = maps

    def __len__(self) -> int:
        return len(self.maps) * math.prod(self.geometry.positions(self.size))

    def project(self, random: Tensor, columns: Sequence[int] = (), groups: int = 1) -> Tensor:
        """keys @ random: a convolution."""
        geometry, count = self.geometry, random.shape[1]
        filters = random.T.reshape(count, geometry.channels // groups, *geometry.kernel).repeat(
            groups, *[1] * (1 + len(self.size))
        )
        convolution = (F.conv1d, F.conv2d, F.conv3d)[len(self.size) - 1]
        found = convolution(self.maps, filters, None, geometry.stride, 0, geometry.dilation, groups).flatten(2)
        found = found.reshape(len(self.maps), groups, count, found.shape[-1]).permute(0, 3, 1, 2)
        return found.reshape(-1, count) if groups == 1 else found.reshape(-1, groups, count)

    def outer(self, errors: Tensor, columns: Sequence[int] = (), groups: int = 1) -> Tensor:
        """Σ error ⊗ key: the gradient of a convolution's weight."""
        geometry, d_out, axes = self.geometry, errors.shape[1], len(self.size)
        if not len(errors):
            return errors.new_zeros(d_out, geometry.patch // groups)
        apart = errors.reshape(len(self.maps), len(errors) // len(self.maps), d_out).transpose(1, 2).reshape(
            len(self.maps), d_out, *geometry.positions(self.size)
        )  # fmt: skip
        weight = errors.new_empty(d_out, geometry.channels // groups, *geometry.kernel)
        found: Tensor = torch.ops.aten.convolution_backward(
            apart.contiguous(), self.maps, weight, None, geometry.stride, [0] * axes, geometry.dilation, False, [0] * axes, groups,
            [False, True, False],
        )[1]  # fmt: skip
        return found.reshape(d_out, -1)

    def dot(self, queries: Tensor, columns: Sequence[int] = ()) -> Tensor:
        """query · key."""
        return part(queries, columns) @ part(self.vectors(), columns).T

    def squared(self) -> Maps:
        """Each number squared."""
        return self._with(self.maps.square())

    def to(self, dtype: torch.dtype) -> Maps:
        """The same keys in another type of numbers."""
        return self._with(self.maps.to(dtype))

    def _with(self, maps: Tensor) -> Maps:
        """Patches of other maps that are padded already."""
        found = Maps.__new__(Maps)
        found.geometry = self.geometry
        found.size = self.size
        found.maps = maps
        return found

    def square_norms(self) -> Tensor:
        """‖key‖²."""
        ones = self.maps.new_ones(self.geometry.patch, 1)
        return self.squared().project(ones)[:, 0]

    def vectors(self) -> Tensor:
        """The patches, (n, channels × kernel)."""
        found, geometry, axes = self.maps, self.geometry, len(self.size)
        for axis in range(axes):
            span = geometry.dilation[axis] * (geometry.kernel[axis] - 1) + 1
            found = found.unfold(2 + axis, span, geometry.stride[axis])[..., :: geometry.dilation[axis]]
        places = list(range(2, 2 + axes))
        found = found.permute(0, *places, 1, *(axes + place for place in places))
        return found.reshape(-1, geometry.patch)


def keys_of(layer: Layer, stored: Tensor, size: Sequence[int], dtype: torch.dtype) -> Keys:
    """Return keys as what they stand for. stored: a row for each, decoded; size: of each feature map; dtype: the type of numbers to compute in."""
    if layer.form == "numbers":
        return Numbers(stored, layer.d_in, dtype)
    if layer.geometry is None:
        return Vectors(stored)
    return Maps(stored.reshape(-1, layer.geometry.channels, *size), layer.geometry)
