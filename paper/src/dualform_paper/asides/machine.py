"""Equation 14: a trained layer as a kernel machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dualform import DualLayer
from dualform_paper.asides.digits import Run
from dualform_paper.section import Section, table
from dualform_paper.settings import LAYERS


@dataclass(frozen=True)
class KernelMachine:
    """Σ_t a_t K(x_t, x) + b with the dot product as kernel."""

    patterns: Tensor
    """x_t, (patterns, d_in)"""
    a: Tensor
    """(patterns, d_out)"""
    b: Tensor
    """(d_out,)"""

    def __call__(self, x: Tensor) -> Tensor:
        """For inputs (n, d_in) → (n, d_out)."""
        return (x @ self.patterns.T) @ self.a + self.b


@dataclass(frozen=True)
class Compared:
    """A layer's kernel machine beside the layer itself."""

    layer: str
    slots: int
    distinct: int
    """Different keys: the patterns of the machine that come from training."""
    unit_vectors: int
    """The patterns that carry the initial part."""
    difference: float
    """The largest |machine − layer| over the test images."""
    largest: float
    """The largest |output|."""


@dataclass(frozen=True)
class Machines:
    """All layers as kernel machines."""

    layers: tuple[Compared, ...]

    def section(self) -> Section:
        """What is found, in words and as a table."""
        first, *others = self.layers
        text = (
            f"Each trained layer equals Σ aₜ K(xₜ, x) + b, with K the dot product, to "
            f"{max(m.difference / m.largest for m in self.layers):.0e} of its largest output: float32 rounding. Equation 14 has no "
            f"initial part; here it is carried by the unit vectors as further patterns, with the columns of W₀ as their aₜ. Equal "
            f"patterns are one pattern with their aₜ added: the first layer, which sees each image {first.slots // first.distinct} "
            f"times, has {first.distinct:,} in the place of {first.slots:,}; the hidden ones have "
            f"{' and '.join(f'{m.distinct:,}' for m in others)}, as their inputs change while the network learns."
        )
        header = ("layer", "slots", "distinct patterns", "unit vectors", "largest difference", "largest output")
        rows = [
            (
                m.layer,
                f"{m.slots:,}",
                f"{m.distinct:,}",
                str(m.unit_vectors),
                f"{m.difference:.1e}",
                f"{m.largest:.1f}",
            )
            for m in self.layers
        ]
        return Section(
            "Equation 14: a trained layer is a kernel machine", f"{text}\n\n{table(header, rows)}", asdict(self)
        )


def machine(layer: DualLayer) -> KernelMachine:
    """A dual layer as a kernel machine; equal patterns are put together."""
    patterns, place = torch.unique(layer.keys, dim=0, return_inverse=True)
    a = patterns.new_zeros(len(patterns), len(layer.initial_weight)).index_add_(0, place, layer.values)
    units = torch.eye(patterns.shape[1], dtype=patterns.dtype)
    b = layer.bias if layer.bias is not None else a.new_zeros(a.shape[1])
    return KernelMachine(torch.cat([patterns, units]), torch.cat([a, layer.initial_weight.T]), b)


def measure(run: Run) -> Machines:
    """Compare every layer with its kernel machine."""
    found = []
    for name in LAYERS:
        layer, queries = run.dual.layer(name), run.queries(name, run.digits.test_images)
        kernel, d_in = machine(layer), queries.shape[1]
        with torch.no_grad():
            primal = run.model.get_submodule(name)(queries)
        difference = float((kernel(queries) - primal).abs().max())
        distinct = len(kernel.patterns) - d_in
        found.append(Compared(name, layer.slots, distinct, d_in, difference, float(primal.abs().max())))
    return Machines(tuple(found))
