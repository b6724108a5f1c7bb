"""Compacted layers by name, and the model that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from dualform.dual.compact import CompactLayer
from dualform.errors import QuestionError
from dualform.layers.streams import Layer


class Compact(Mapping[str, CompactLayer]):
    """Layers with few slots of their own, by name. Made by `dual.compact(rank)`."""

    def __init__(self, layers: dict[str, CompactLayer], model: Callable[[], nn.Module]):
        self._layers, self._model = layers, model

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
