"""What layers learned in as few slots as a rank allows: the paper's remark 3.4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualform.dual.layer import DualLayer
from dualform.errors import QuestionError
from dualform.layers.layer import Layer


@dataclass(frozen=True)
class CompactLayer:
    """A layer with few slots of its own: W ≈ initial part + Σ value ⊗ key. No slot is a training example any more."""

    name: str
    initial_weight: Tensor
    """(d_out, d_in)"""
    keys: Tensor
    """(rank, d_in), orthonormal; the most important one first."""
    values: Tensor
    """(rank, d_out), orthogonal; as long as what was learned is strong in their direction."""
    bias: Tensor | None
    """As it was trained, (d_out,)."""
    error: float
    """‖what is lost‖ / ‖what was learned‖ (Frobenius); no other system of this rank has a smaller one."""
    slots: int
    """How many of the layer's slots the few replace; if others share its weight, theirs too."""

    @property
    def rank(self) -> int:
        """How many slots there are now."""
        return len(self.keys)

    @property
    def weight(self) -> Tensor:
        """The compacted matrix, (d_out, d_in)."""
        return self.initial_weight + self.values.T @ self.keys

    def forward(self, x: Tensor) -> Tensor:
        """Initial part + attention over the few slots (+ bias), for inputs (*, d_in) → (*, d_out)."""
        x = x.detach().to("cpu", self.keys.dtype)
        output = x @ self.initial_weight.T + (x @ self.keys.T) @ self.values
        return output if self.bias is None else output + self.bias

    __call__ = forward

    def __repr__(self) -> str:
        return f"CompactLayer({self.name!r}, {self.rank} of {self.slots:,} slots, error {self.error:.1e})"


def compact(layer: DualLayer, rank: int) -> CompactLayer:
    """Keep the `rank` strongest directions of what a layer learned (Eckart and Young, 1936)."""
    learned = layer.learned.double()
    most = min(learned.shape)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
        raise QuestionError(
            f"rank {rank!r}: layer {layer.name!r} has {learned.shape[1]} inputs and {learned.shape[0]} outputs, so expected a "
            f"whole number from 1 to {most}. Layers of other sizes can be asked on their own, with layers=."
        )
    U, strengths, Vh = torch.linalg.svd(learned, full_matrices=False)
    squares = strengths.square()
    return CompactLayer(
        name=layer.name,
        initial_weight=layer.initial_weight,
        keys=Vh[:rank].to(layer.initial_weight.dtype),
        values=(U[:, :rank] * strengths[:rank]).T.to(layer.initial_weight.dtype),
        bias=layer.bias,
        error=float((squares[rank:].sum() / squares.sum()).sqrt()) if squares.any() else 0.0,
        slots=layer.slots,
    )


class Compact(Mapping[str, CompactLayer]):
    """Layers with few slots of their own, by name. Made by `dual.compact(rank)`."""

    def __init__(self, layers: dict[str, CompactLayer], model: Callable[[], nn.Module]):
        self._layers = layers
        self._model = model

    def model(self) -> nn.Module:
        """A plain copy of the model with the compacted weights; layers that were not asked for stay as trained."""
        return self._model()

    def __getitem__(self, layer: str) -> CompactLayer:
        return self._layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return "\n".join(repr(layer) for layer in self._layers.values())


def compacted_weights(layer: Layer, compacted: CompactLayer, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameter of a layer that is one matrix, compacted, by its full name."""
    uses = layer.bilinear()
    use = uses[0]
    if len(uses) != 1 or use.groups != 1 or use.rows or use.keys or use.errors or layer.outputs:
        raise QuestionError(
            f"layer {layer.name!r} is several matrices at once, or only some of its outputs were kept: its few slots cannot be "
            f"written back as a parameter. Name other layers with layers=."
        )
    matrix = compacted.weight.T if use.role == "table" else compacted.weight
    return {use.parameter: matrix.reshape(trained[use.parameter].shape)}
