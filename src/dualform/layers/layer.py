"""What is known of a recorded layer: the sizes of its keys and error signals, and which parameters its slots make up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

COUNT_LIMIT = 2**53
"""Numbers in a manifest are smaller than this, so that every JSON reader holds them exactly and sums of many fit into 64 bits."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_LIMIT)]
"""A number in a manifest."""


def spans(columns: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin, end, begin, end … as pairs."""
    return list(zip(columns[::2], columns[1::2], strict=True))


@dataclass(frozen=True)
class Use:
    """How the gradient of a parameter is computed from a layer's slots."""

    parameter: str
    role: str
    """weight: Σ error ⊗ key; table: Σ key ⊗ error, for parameters of shape (d_in, d_out); bias: Σ error; scale: Σ of the slots' own parts."""
    rows: tuple[Count, ...] = ()
    """The rows (begin, end) of the parameter that it is about, if not all."""
    keys: tuple[Count, ...] = ()
    """The columns (begin, end) of the key, if not all."""
    errors: tuple[Count, ...] = ()
    """The columns (begin, end, begin, end …) of the error signal, if not all."""
    groups: Count = 1
    """Key and error signal are cut into this many groups, each with a linear map of its own (convolutions)."""


@dataclass(frozen=True)
class Geometry:
    """How patches are cut from feature maps: one number for each axis."""

    channels: Count
    kernel: tuple[Count, ...]
    stride: tuple[Count, ...]
    padding: tuple[Count, ...]
    """Before and after each axis."""
    dilation: tuple[Count, ...]
    mode: str
    """How the border is filled: zeros, reflect, replicate, circular."""

    @property
    def reach(self) -> list[int]:
        """How far a patch reaches along each axis."""
        return [dilation * (length - 1) + 1 for dilation, length in zip(self.dilation, self.kernel, strict=True)]

    def positions(self, size: Sequence[int]) -> tuple[int, ...]:
        """How many patches there are along each axis of maps of this size."""
        counts = []
        for axis, (before, after) in enumerate(spans(self.padding)):
            padded = size[axis] + before + after
            counts.append((padded - self.reach[axis]) // self.stride[axis] + 1)
        return tuple(counts)

    @property
    def patch(self) -> int:
        """How long a patch is."""
        return self.channels * math.prod(self.kernel)


@dataclass(frozen=True)
class ProjectedFrom:
    """What the slots of a projected layer were before they went through random matrices (layers/projected.py)."""

    layer: Layer
    """As the network has it."""
    size: Count
    """How long keys and error signals are afterwards, at most."""
    seed: Count
    """The matrices are drawn from it: they are not stored."""


@dataclass(frozen=True)
class Layer:
    """One recorded layer. Its place in the manifest's list of layers is its number in chunks."""

    name: str
    kind: str
    d_in: Count
    d_out: Count
    uses: tuple[Use, ...]
    form: str = "vectors"
    """How keys are stored: vectors, as they are; numbers, the place of the one in a one-hot vector; maps, feature maps from which
    patches are cut; parts, each slot's own part of an elementwise weight's gradient (then there is no key)."""
    geometry: Geometry | None = None
    outputs: tuple[Count, ...] = ()
    """The output units whose error signals are kept, if not all are."""
    keep: str = "slots"
    """What is kept of its slots: one of KEEPS in store/format.py."""
    projected_from: ProjectedFrom | None = None
    """Of a projected layer: where its slots come from. All else describes the slots that are stored."""

    @property
    def in_network(self) -> Layer:
        """The layer as the network has it, whose queries are not projected."""
        return self if self.projected_from is None else self.projected_from.layer

    @property
    def explains_gradients(self) -> bool:
        """Whether its part of each gradient can be put together again from what is kept."""
        return self.keep != "keys" and self.projected_from is None

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that it uses, each once."""
        return list(dict.fromkeys(use.parameter for use in self.uses))

    @property
    def attends(self) -> bool:
        """Whether it has keys, hence attention weights."""
        return self.form != "parts"

    def vectors(self) -> set[str]:
        """The parameters that are vectors (biases, elementwise weights): their own gradients are kept."""
        return {use.parameter for use in self.uses if use.role in ("bias", "scale")}

    def bilinear(self) -> list[Use]:
        """The uses in which an error signal is multiplied by a key."""
        return [use for use in self.uses if use.role in ("weight", "table")]

    def biases(self) -> list[Use]:
        """The uses that are biases. All of a layer's biases share one gradient, Σ error."""
        return [use for use in self.uses if use.role == "bias"]

    def uses_of(self, parameter: str) -> list[Use]:
        """The uses of one parameter."""
        return [use for use in self.uses if use.parameter == parameter]

    @property
    def kept_outputs(self) -> int:
        """How many numbers of an error signal are kept."""
        return len(self.outputs) or self.d_out

    @property
    def gradient_width(self) -> int:
        """How many numbers of Σ error ⊗ key belong to one output."""
        groups = max(use.groups for use in self.uses)
        return self.d_in // groups

    @property
    def gradient_size(self) -> int:
        """How many numbers the gradient of a row has: Σ error ⊗ key, and Σ error if there is a bias."""
        return self.kept_outputs * (self.gradient_width + bool(self.biases()))


def joined(module: str, layer: str) -> str:
    """The name of one of a module's layers."""
    return f"{module}.{layer}" if module and layer else module or layer
