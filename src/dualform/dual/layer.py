"""One layer in its dual form, on the level of the paper: keys, values, attention weights, equation 13."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from dualform.dual.coefficients import Coefficients, is_elementwise, updates_of, walked
from dualform.dual.gradients import compute_dtype
from dualform.dual.rows import chosen_rows
from dualform.dual.weights import as_bias, as_matrix, initial, rebuilt, values
from dualform.errors import NotRecordedError
from dualform.layers.keys import Keys
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk


class DualLayer:
    """S₂ of corollary 1: x ↦ W_0 x + Attention(X, E, x), with W_0 the initial part. Made by `dual.layer(name)`.

    Several parameters that share a layer's key (a recurrent layer's) are one matrix here; a table (an embedding) is turned.
    Threads may share it.
    """

    def __init__(self, store: Store, name: str, end: int):
        if store.manifest.keep == "totals":
            raise NotRecordedError(f'{store.location} keeps totals only, no keys and values. Record with keep="slots".')
        self._store = store
        self._end = end
        _, self._layer = store.layer(name)
        self.name = name
        if self._layer.projected_from is not None:
            raise NotRecordedError(store.why_no_positions(name))
        if not self._layer.attends:
            raise NotRecordedError(
                f"layer {name!r} is elementwise: it has no keys, hence no attention. Ask contributions."
            )
        self._uses = self._layer.bilinear()
        self._weights = list(dict.fromkeys(use.parameter for use in self._uses))
        self._dtype = compute_dtype(store, self._weights[0])

    def __repr__(self) -> str:
        return f"DualLayer({self.name!r}, {self._layer.d_in} → {self._layer.d_out}, {self.slots:,} slots)"

    # Parameters

    @cached_property
    def initial_weight(self) -> Tensor:
        """a·W_0 + b·(optimizer state when recording began), (d_out, d_in)."""
        weights = {name: self._initial(name) for name in self._weights}
        return self._matrix(weights)

    def _initial(self, name: str) -> Tensor:
        outputs = self._layer.outputs
        rows = None
        if outputs:
            rows = chosen_rows(self._store, name, outputs)
        return initial(self._store, name, self._end, rows)

    @cached_property
    def learned(self) -> Tensor:
        """What all slots wrote together: the trained weight less its initial part, (d_out, d_in)."""
        trained = {name: self._rebuilt(name) for name in self._weights}
        return self._matrix(trained) - self.initial_weight

    @cached_property
    def bias(self) -> Tensor | None:
        """The bias from its own slots (its key is the constant 1), (d_out,)."""
        biases = {use.parameter: self._rebuilt(use.parameter) for use in self._layer.biases()}
        bias = as_bias(self._layer, biases)
        return None if bias is None else bias.to(self._dtype)

    def _rebuilt(self, name: str) -> Tensor:
        return rebuilt(self._store, name, begin=0, end=self._end)

    def _matrix(self, weights: dict[str, Tensor]) -> Tensor:
        return as_matrix(self._layer, weights).to(self._dtype)

    @cached_property
    def _coefficients(self) -> Coefficients | None:
        """None: they are matrices."""
        updates = [updates_of(self._store, name, end=self._end) for name in self._weights]
        if any(map(is_elementwise, updates)):
            return None
        return walked(updates[0])

    def _plain_coefficients(self) -> Coefficients:
        if self._coefficients is None:
            raise NotRecordedError(
                f"layer {self.name!r} was trained by an optimizer of the Adam family: the coefficient of a slot is a matrix, so "
                f"its value is no vector. Ask contributions(), which take the matrices into account."
            )
        return self._coefficients

    # Slots

    @cached_property
    def slots(self) -> int:
        """How many key–value pairs it attends to."""
        return sum(chunk.slots for chunk in self._chunks())

    @property
    def keys(self) -> Tensor:
        """X, one row a slot: (slots, d_in). All of them are read into memory."""
        empty = torch.zeros(0, self._layer.d_in, dtype=self._dtype)
        pieces = [keys.vectors() for *_, keys in self._pieces()]
        return torch.cat([empty, *pieces])

    @property
    def values(self) -> Tensor:
        """E, one row a slot: (slots, d_out), −coefficient × error signal. All of them are read into memory."""
        pieces = [piece for *_, piece in self.pieces()]
        if not pieces:
            return torch.zeros(0, self._layer.d_out, dtype=self._dtype)
        return torch.cat(pieces)

    def pieces(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Keys and values in the order of slots, a piece at a time: (number of the first slot, (m, d_in), (m, d_out))."""
        by_slot = self._plain_coefficients()
        for chunk, low, high, keys in self._pieces():
            first = chunk.first_slot + low
            piece = values(chunk, by_slot, low, high, self._dtype)
            yield first, keys.vectors(), piece

    def take(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys (m, d_in) and values (m, d_out) of some slots by their numbers; only what they need is read."""
        by_slot = self._plain_coefficients()
        wanted = torch.as_tensor(slots, dtype=torch.int64)
        taken_keys = torch.zeros(len(wanted), self._layer.d_in, dtype=self._dtype)
        taken_values = torch.zeros(len(wanted), self._layer.kept_outputs, dtype=self._dtype)
        for chunk in self._chunks():
            in_chunk = wanted - chunk.first_slot
            is_here = (in_chunk >= 0) & (in_chunk < chunk.slots)
            for place in torch.nonzero(is_here)[:, 0]:
                low = int(in_chunk[place])
                first, last = chunk.whole(low)
                keys = chunk.keys(self._dtype, first, last)
                taken_keys[place] = keys.vectors()[low - first]
                value = values(chunk, by_slot, low, low + 1, self._dtype)
                taken_values[place] = value[0]
        return taken_keys, taken_values

    def _chunks(self) -> Iterator[SlotChunk]:
        return self._store.chunks(self.name, end_step=self._end)

    def _pieces(self) -> Iterator[tuple[SlotChunk, int, int, Keys]]:
        """The slots in their order, a piece at a time: (chunk, first, end, keys)."""
        for chunk in self._chunks():
            for low, high in chunk.pieces(self._layer.d_in + self._layer.d_out):
                keys = chunk.keys(self._dtype, low, high)
                yield chunk, low, high, keys

    # Attention

    def attention_weights(self, query: Tensor) -> Tensor:
        """α_t = x_t · x for queries (*, d_in) → (*, slots)."""
        if self._store.is_summed(self.name):
            raise NotRecordedError(self._store.why_no_positions(self.name))
        query = self._converted(query)
        flat = query.reshape(-1, query.shape[-1])
        empty = flat.new_zeros(len(flat), 0)
        pieces = [keys.dot(flat) for *_, keys in self._pieces()]
        weights = torch.cat([empty, *pieces], dim=-1)
        return weights.reshape(*query.shape[:-1], weights.shape[-1])

    def attention(self, query: Tensor) -> Tensor:
        """Attention(X, E, x) = Σ_t α_t e_t for queries (*, d_in) → (*, d_out), chunk by chunk."""
        query = self._converted(query)
        if self._coefficients is None or not self._is_one_matrix or self._store.is_summed(self.name):
            return query @ self.learned.T
        flat = query.reshape(-1, query.shape[-1])
        total = torch.zeros(len(flat), self._layer.kept_outputs, dtype=torch.float64)
        for chunk, low, high, keys in self._pieces():
            piece = values(chunk, self._coefficients, low, high, self._dtype)
            weights = keys.dot(flat)
            total += (weights @ piece).double()
        result = total.to(self._dtype)
        return result.reshape(*query.shape[:-1], -1)

    @property
    def _is_one_matrix(self) -> bool:
        """Whether the slots write to one matrix that no other layer writes to."""
        if len(self._uses) != 1 or self._uses[0].groups != 1:
            return False
        return len(self._store.users(self._weights[0])) == 1

    def forward(self, x: Tensor) -> Tensor:
        """W_0 x + Attention(X, E, x) (+ bias), equation 13; equals the primal layer."""
        x = self._converted(x)
        output = x @ self.initial_weight.T + self.attention(x)
        if self.bias is None:
            return output
        return output + self.bias

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", self._dtype)

    __call__ = forward
