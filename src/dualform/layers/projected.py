"""keep="projected": slots seen through random matrices, P_inᵀ key and P_outᵀ error signal, which are shorter.

Σ error ⊗ key of a row becomes P_outᵀ G P_in. The columns of P are a random orthonormal frame times √(d / k), so P Pᵀ is the identity on
average, and ⟨P_outᵀ Q P_in, P_outᵀ G P_in⟩ is ⟨Q, G⟩ on average. A side that is no longer than the frame stays as it is.

A projected layer is an ordinary layer with short vectors: all that reads slots or row gradients reads it, and queries go through the
same matrices. The matrices are drawn again from their seed, by a generator of NumPy whose numbers never change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch
import xxhash
from torch import Tensor

from dualform.layers.keys import Keys, OneHot, Vectors, select_columns
from dualform.layers.layer import Layer, ProjectedFrom, Use

Range = tuple[int, ...]
"""begin, end, begin, end … of some columns of a key or an error signal; empty: all of them."""
DEFAULT_SIZE = 64


def projected_layer(layer: Layer, size: int, seed: int) -> Layer:
    """Return a layer whose slots are those of another one, projected; the layer itself if no side of it is longer than `size`."""
    views = SlotViews(layer, size, seed)
    if not any(view.is_random for view in (*views.of_keys.values(), *views.of_errors.values())):
        return layer
    uses = [_projected_use(use, views) for use in layer.uses]
    return replace(
        layer,
        d_in=views.d_in,
        d_out=views.d_out,
        uses=tuple(uses),
        form="parts" if layer.form == "parts" else "vectors",
        geometry=None,
        projected_from=ProjectedFrom(layer, size, seed),
    )


def _projected_use(use: Use, views: SlotViews) -> Use:
    is_vector = use.role in ("bias", "scale")
    keys = () if is_vector else views.places(views.of_keys, use.keys)
    errors = views.places(views.of_errors, use.errors)
    role = "weight" if use.role == "table" else use.role
    return replace(use, role=role, rows=(), keys=keys, errors=errors, groups=1)


@dataclass(frozen=True)
class View:
    """How a part of keys or error signals is seen."""

    columns: Range
    length: int
    """Of the part."""
    size: int
    """Of what is stored of it."""
    seed: int

    @property
    def is_random(self) -> bool:
        """Whether it goes through a random matrix; else it stays as it is."""
        return self.size < self.length

    def matrix(self, like: Tensor) -> Tensor:
        """P, (length, size), in the type and on the device of a tensor."""
        return _frame_like(self.length, self.size, self.seed, like.dtype, like.device)

    def of(self, vectors: Tensor) -> Tensor:
        """(n, all columns) → (n, size)."""
        own = select_columns(vectors, self.columns)
        return own @ self.matrix(own) if self.is_random else own


class SlotViews:
    """How the slots of a layer are projected: its keys and its error signals fall into parts where several weights see different ones."""

    def __init__(self, layer: Layer, size: int, seed: int):
        self.layer = layer
        self.groups = max(use.groups for use in layer.uses)
        bilinear = layer.bilinear()
        key_parts = dict.fromkeys(use.keys for use in bilinear) or {(): None}
        error_parts = dict.fromkeys(use.errors for use in layer.uses if use.role != "scale") or {(): None}
        width = layer.d_in // self.groups
        self.of_keys = _views([*key_parts], width, size, f"{seed} keys")
        self.of_errors = _views([*error_parts], layer.kept_outputs, size, f"{seed} errors")

    @staticmethod
    def of(layer: Layer) -> SlotViews:
        """Return those of a projected layer."""
        origin = layer.projected_from
        assert origin is not None
        return _views_of(origin)

    @cached_property
    def d_in(self) -> int:
        """How long projected keys are."""
        return sum(view.size for view in self.of_keys.values())

    @cached_property
    def d_out(self) -> int:
        """How long projected error signals are."""
        return sum(view.size for view in self.of_errors.values())

    def places(self, views: dict[Range, View], columns: Range) -> Range:
        """Return where the part with these columns stands among the projected ones; empty: there is no other."""
        if len(views) == 1:
            return ()
        sizes = [view.size for view in views.values()]
        place = [*views].index(columns)
        begin = sum(sizes[:place])
        return begin, begin + sizes[place]

    def keys(self, keys: Keys) -> Tensor:
        """(n × groups, d_in), a line for each slot and group."""
        parts = [self._key_part(keys, view) for view in self.of_keys.values()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _key_part(self, keys: Keys, view: View) -> Tensor:
        if not view.is_random:
            return select_columns(keys.vectors(), view.columns).reshape(-1, view.size)
        if isinstance(keys, Vectors):
            whole = keys.data.reshape(-1, keys.data.shape[1] // self.groups)
            return view.of(whole)
        if isinstance(keys, OneHot):
            norms = keys.square_norms().unsqueeze(1)
            return view.matrix(norms)[keys.places] * norms  # −1 is a key of zeros
        found = keys.project(view.matrix(keys.maps), groups=self.groups)
        return found.reshape(-1, view.size)

    def errors(self, errors: Tensor) -> Tensor:
        """(n, kept outputs) → (n × groups, d_out)."""
        parts = [self._error_part(errors, view) for view in self.of_errors.values()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _error_part(self, errors: Tensor, view: View) -> Tensor:
        if self.groups == 1:
            return view.of(errors)
        # A group has some of the outputs: those of the others are zeros to it
        own = errors.reshape(len(errors), self.groups, -1)
        if view.is_random:
            by_group = view.matrix(errors).reshape(self.groups, -1, view.size)
        else:
            by_group = torch.eye(view.size, dtype=errors.dtype, device=errors.device).reshape(
                self.groups, -1, view.size
            )
        projected: Tensor = torch.einsum("ngo,gok->ngk", own, by_group)
        return projected.flatten(0, 1)


def project_queries(layer: Layer, queries: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and slopes of the network as a layer's slots are stored: projected, if these are.

    queries (examples, positions, d_in or 1), slopes (examples, positions, d_out); of a grouped convolution, each group of a position becomes one.
    """
    if layer.projected_from is None:
        return queries, slopes
    views = SlotViews.of(layer)
    examples = len(queries)
    origin = layer.in_network
    flat = queries.flatten(0, 1)
    is_one_hot = origin.form == "numbers"
    keys = views.keys(OneHot(flat, origin.d_in, slopes.dtype) if is_one_hot else Vectors(flat))
    errors = views.errors(slopes.flatten(0, 1))
    return keys.reshape(examples, -1, views.d_in), errors.reshape(examples, -1, views.d_out)


@cache
def _views_of(origin: ProjectedFrom) -> SlotViews:
    return SlotViews(origin.layer, origin.size, origin.seed)


def _views(parts: Sequence[Range], whole: int, size: int, seed: str) -> dict[Range, View]:
    """Return how each of these parts is seen. All together, they are no longer than `size`, unless there are more parts than that."""
    most = max(1, size // len(parts))
    views = {}
    for columns in parts:
        length = sum(columns[1::2]) - sum(columns[::2]) if columns else whole
        own_seed = xxhash.xxh32_intdigest(f"{seed} {columns}".encode())
        views[columns] = View(columns, length, min(length, most), own_seed)
    return views


@cache
def _frame_like(length: int, size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A frame in a type and on a device: copied once, not at each backward pass."""
    return torch.from_numpy(frame(length, size, seed)).to(dtype).to(device)


def frame(length: int, size: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return a random orthonormal frame times √(length / size), (length, size)."""
    # The numbers of RandomState are promised to stay the same in all versions of NumPy; those of newer generators are not
    normal = np.random.RandomState(seed).standard_normal((length, size))
    found, triangle = np.linalg.qr(normal)
    # QR leaves the sign of each column open
    signs = np.where(np.diag(triangle) < 0, -1.0, 1.0)
    scaled: np.ndarray[tuple[int, int], np.dtype[np.float64]] = found * (signs * math.sqrt(length / size))
    return scaled


def layer_seed(seed: int, layer: str) -> int:
    """Return the seed of a layer's matrices in a recording with this seed."""
    return xxhash.xxh32_intdigest(f"{seed} {layer}".encode())
