"""One layer in its dual form, on the level of the paper: keys, values, attention weights, equation 13."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from dualform.dual.coefficients import Coefficients, coefficients, is_elementwise, updates_of
from dualform.dual.gradients import chosen_rows, compute_dtype
from dualform.dual.weights import as_bias, as_matrix, initial, rebuilt, values
from dualform.errors import NotRecordedError
from dualform.store.reader import Store


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
        if not self._layer.attends:
            raise NotRecordedError(
                f"layer {name!r} is elementwise: it has no keys, hence no attention. Ask contributions."
            )
        self._weights = list(dict.fromkeys(use.parameter for use in self._layer.bilinear()))
        self._dtype = compute_dtype(store, self._weights[0])

    def __repr__(self) -> str:
        return f"DualLayer({self.name!r}, {self._layer.d_in} → {self._layer.d_out}, {self.slots:,} slots)"

    @cached_property
    def slots(self) -> int:
        """How many key–value pairs it attends to."""
        return sum(chunk.slots for chunk in self._store.chunks(self.name, end_step=self._end))

    @cached_property
    def _coefficients(self) -> Coefficients | None:
        """None: they are matrices."""
        found = [updates_of(self._store, name, end=self._end) for name in self._weights]
        if any(is_elementwise(updates) for updates in found):
            return None
        return coefficients(self._store, self._weights[0], end=self._end)

    @cached_property
    def initial_weight(self) -> Tensor:
        """a·W_0 + b·(optimizer state when recording began), (d_out, d_in)."""
        rows = {
            n: chosen_rows(self._store, n, self._layer.outputs) if self._layer.outputs else None for n in self._weights
        }
        found = {name: initial(self._store, name, self._end, rows[name]) for name in self._weights}
        return as_matrix(self._layer, found).to(self._dtype)

    @cached_property
    def bias(self) -> Tensor | None:
        """The bias from its own slots (its key is the constant 1), (d_out,)."""
        names = [use.parameter for use in self._layer.uses if use.role == "bias"]
        found = as_bias(self._layer, {name: rebuilt(self._store, name, begin=0, end=self._end) for name in names})
        return None if found is None else found.to(self._dtype)

    @property
    def keys(self) -> Tensor:
        """X, one row a slot: (slots, d_in). All of them are read into memory."""
        chunks = self._store.chunks(self.name, end_step=self._end)
        width = self._layer.d_in + self._layer.d_out
        found = [chunk.keys(self._dtype, *piece).vectors() for chunk in chunks for piece in chunk.pieces(width)]
        return torch.cat(found) if found else torch.zeros(0, self._layer.d_in, dtype=self._dtype)

    @property
    def values(self) -> Tensor:
        """E, one row a slot: (slots, d_out), −coefficient × error signal. All of them are read into memory."""
        coefficients = self._plain_coefficients()
        found = [
            values(chunk, coefficients, 0, chunk.slots, self._dtype)
            for chunk in self._store.chunks(self.name, end_step=self._end)
        ]
        return torch.cat(found) if found else torch.zeros(0, self._layer.d_out, dtype=self._dtype)

    def _plain_coefficients(self) -> Coefficients:
        if self._coefficients is None:
            raise NotRecordedError(
                f"layer {self.name!r} was trained by an optimizer of the Adam family: the coefficient of a slot is a matrix, so "
                f"its value is no vector. Ask contributions(), which take the matrices into account."
            )
        return self._coefficients

    def pieces(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Keys and values in the order of slots, a piece at a time: (number of the first slot, (m, d_in), (m, d_out))."""
        found = self._plain_coefficients()
        for chunk in self._store.chunks(self.name, end_step=self._end):
            for low, high in chunk.pieces(self._layer.d_in + self._layer.d_out):
                keys = chunk.keys(self._dtype, low, high).vectors()
                yield chunk.first_slot + low, keys, values(chunk, found, low, high, self._dtype)

    def take(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys (m, d_in) and values (m, d_out) of some slots by their numbers; only what they need is read."""
        found = self._plain_coefficients()
        wanted = torch.as_tensor(slots, dtype=torch.int64)
        keys = torch.zeros(len(wanted), self._layer.d_in, dtype=self._dtype)
        written = torch.zeros(len(wanted), len(self._layer.outputs) or self._layer.d_out, dtype=self._dtype)
        for chunk in self._store.chunks(self.name, end_step=self._end):
            for place in torch.nonzero((wanted >= chunk.first_slot) & (wanted < chunk.first_slot + chunk.slots))[:, 0]:
                low = int(wanted[place]) - chunk.first_slot
                first, last = chunk.whole(low)
                keys[place] = chunk.keys(self._dtype, first, last).vectors()[low - first]
                written[place] = values(chunk, found, low, low + 1, self._dtype)[0]
        return keys, written

    def attention_weights(self, query: Tensor) -> Tensor:
        """α_t = x_t · x for queries (*, d_in) → (*, slots)."""
        query = query.detach().to("cpu", self._dtype)
        flat = query.reshape(-1, query.shape[-1])
        found = [
            chunk.keys(self._dtype, *piece).dot(flat)
            for chunk in self._store.chunks(self.name, end_step=self._end)
            for piece in chunk.pieces(self._layer.d_in + self._layer.d_out)
        ]
        weights = torch.cat(found, dim=-1) if found else flat.new_zeros(len(flat), 0)
        return weights.reshape(*query.shape[:-1], weights.shape[-1])

    @cached_property
    def learned(self) -> Tensor:
        """What all slots wrote together: the trained weight less its initial part, (d_out, d_in)."""
        found = {name: rebuilt(self._store, name, begin=0, end=self._end) for name in self._weights}
        return as_matrix(self._layer, found).to(self._dtype) - self.initial_weight

    def attention(self, query: Tensor) -> Tensor:
        """Attention(X, E, x) = Σ_t α_t e_t for queries (*, d_in) → (*, d_out), chunk by chunk."""
        query = query.detach().to("cpu", self._dtype)
        plain = len(self._layer.bilinear()) == 1 and self._layer.bilinear()[0].groups == 1
        plain = plain and len(self._store.users(self._weights[0])) == 1
        if self._coefficients is None or not plain:
            return query @ self.learned.T
        flat = query.reshape(-1, query.shape[-1])
        total = torch.zeros(len(flat), len(self._layer.outputs) or self._layer.d_out, dtype=torch.float64)
        for chunk in self._store.chunks(self.name, end_step=self._end):
            for low, high in chunk.pieces(self._layer.d_in + self._layer.d_out):
                weights = chunk.keys(self._dtype, low, high).dot(flat)
                total += (weights @ values(chunk, self._coefficients, low, high, self._dtype)).double()
        return total.to(self._dtype).reshape(*query.shape[:-1], -1)

    def forward(self, x: Tensor) -> Tensor:
        """W_0 x + Attention(X, E, x) (+ bias), equation 13; equals the primal layer."""
        x = x.detach().to("cpu", self._dtype)
        output = x @ self.initial_weight.T + self.attention(x)
        return output if self.bias is None else output + self.bias

    __call__ = forward
