"""One layer in its dual form, on the level of the paper: keys, values, attention weights, equation 13."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dualform.dual.coefficients import Coefficients, coefficients
from dualform.dual.weights import compute_dtype, initial_part, pieces, rebuilt_bias, values
from dualform.errors import NotRecordedError
from dualform.store.reader import Store


class DualLayer:
    """S₂ of corollary 1: x ↦ W_0 x + Attention(X, E, x), with W_0 the initial part. Made by `dual.layer(name)`."""

    def __init__(self, store: Store, name: str, end: int):
        if store.manifest.keep == "totals":
            raise NotRecordedError(f'{store.folder} keeps totals only, no keys and values. Record with keep="slots".')
        self._store, self._end = store, end
        _, self._layer = store.layer(name)
        self.name = name
        self._dtype = compute_dtype(store, self._layer.weight)

    def __repr__(self) -> str:
        return f"DualLayer({self.name!r}, {self._layer.d_in} → {self._layer.d_out}, {self.slots:,} slots)"

    @cached_property
    def slots(self) -> int:
        """How many key–value pairs it attends to."""
        return sum(chunk.slots for chunk in self._store.chunks(self.name, end_step=self._end))

    @cached_property
    def _coefficients(self) -> Coefficients:
        return coefficients(self._store, self._layer.weight, end=self._end)

    @cached_property
    def initial_weight(self) -> Tensor:
        """a·W_0 + b·(optimizer state when recording began), (d_out, d_in)."""
        return initial_part(self._store, self._layer.weight, self._coefficients).to(self._dtype)

    @cached_property
    def bias(self) -> Tensor | None:
        """The bias from its own slots (its key is the constant 1), (d_out,)."""
        if self._layer.bias is None:
            return None
        return rebuilt_bias(self._store, self._layer, begin=0, end=self._end).to(self._dtype)

    @property
    def keys(self) -> Tensor:
        """X, one row a slot: (slots, d_in). All of them are read into memory."""
        found = [chunk.keys(self._dtype) for chunk in self._store.chunks(self.name, end_step=self._end)]
        return torch.cat(found) if found else torch.zeros(0, self._layer.d_in, dtype=self._dtype)

    @property
    def values(self) -> Tensor:
        """E, one row a slot: (slots, d_out), −coefficient × error signal. All of them are read into memory."""
        found = [
            values(chunk, self._coefficients, 0, chunk.slots, self._dtype)
            for chunk in self._store.chunks(self.name, end_step=self._end)
        ]
        return torch.cat(found) if found else torch.zeros(0, self._layer.d_out, dtype=self._dtype)

    def attention_weights(self, query: Tensor) -> Tensor:
        """α_t = x_t · x for queries (*, d_in) → (*, slots)."""
        query = query.detach().to("cpu", self._dtype)
        found = [query @ chunk.keys(self._dtype).T for chunk in self._store.chunks(self.name, end_step=self._end)]
        return torch.cat(found, dim=-1) if found else query.new_zeros(*query.shape[:-1], 0)

    def attention(self, query: Tensor) -> Tensor:
        """Attention(X, E, x) = Σ_t α_t e_t for queries (*, d_in) → (*, d_out), chunk by chunk."""
        query = query.detach().to("cpu", self._dtype)
        total = torch.zeros(*query.shape[:-1], self._layer.d_out, dtype=torch.float64)
        for chunk in self._store.chunks(self.name, end_step=self._end):
            for low, high in pieces(chunk, self._layer.d_in + self._layer.d_out):
                weights = query @ chunk.keys(self._dtype, low, high).T
                total += (weights @ values(chunk, self._coefficients, low, high, self._dtype)).double()
        return total.to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """W_0 x + Attention(X, E, x) (+ bias), equation 13; equals the primal layer."""
        x = x.detach().to("cpu", self._dtype)
        output = x @ self.initial_weight.T + self.attention(x)
        return output if self.bias is None else output + self.bias

    __call__ = forward
