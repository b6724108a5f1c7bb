"""Remark 3.3: an input that is orthogonal to all training inputs gets the initial part only."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dualform_paper.asides.digits import Run
from dualform_paper.section import Section, table
from dualform_paper.settings import LAYERS

INPUTS = 100
"""How many orthogonal inputs are drawn."""


@dataclass(frozen=True)
class Met:
    """What some inputs meet in the first layer; means over them."""

    inputs: str
    largest_weight: float
    """The largest |attention weight| of all inputs and slots."""
    initial: float
    """‖W_0 x‖"""
    attention: float
    """‖Attention(X, E, x)‖"""
    difference: float
    """‖W x − W_0 x‖ in the trained network itself, whose weights know nothing of slots."""


@dataclass(frozen=True)
class Orthogonal:
    """Inputs orthogonal to all that the first layer was trained on, beside ordinary ones."""

    directions: dict[str, int]
    """Of each layer: how many orthogonal directions its recorded keys leave free."""
    silent: dict[str, tuple[int, ...]]
    """Of each layer: its inputs that were 0 in all of training."""
    met: tuple[Met, ...]

    def section(self) -> Section:
        """What is found, in words and as a table."""
        orthogonal, digits = self.met
        pixels, *units = self.silent.values()
        _, *free = self.directions.values()
        text = (
            f"No training digit has ink in {len(pixels)} of the 64 pixels (numbers {', '.join(map(str, pixels))}), and the keys of the "
            f"first layer leave {self.directions[LAYERS[0]]} directions free; those of the others leave {' and '.join(map(str, free))}, "
            f"with {' and '.join(str(len(some)) for some in units)} hidden units that never fired. {INPUTS} inputs drawn from the first "
            f"layer's free directions, as long as a digit, get an attention of norm {orthogonal.attention:.0e} beside an initial part of "
            f"{orthogonal.initial:.2f}; a test digit gets {digits.attention:.2f} beside {digits.initial:.2f}. The trained weights agree: "
            f"they differ from the initial ones by {orthogonal.difference:.0e} on such inputs. Only the bias is what training "
            f"made it, as its key is 1 for every input."
        )
        header = ("inputs of the first layer", "largest weight", "‖W₀x‖", "‖Attention(X, E, x)‖", "‖Wx − W₀x‖")
        rows = [
            (m.inputs, f"{m.largest_weight:.1e}", f"{m.initial:.3f}", f"{m.attention:.1e}", f"{m.difference:.1e}")
            for m in self.met
        ]
        return Section(
            "Remark 3.3: inputs orthogonal to all of training", f"{text}\n\n{table(header, rows)}", asdict(self)
        )


def measure(run: Run) -> Orthogonal:
    """Draw inputs from the null space of the first layer's keys."""
    spaces = {name: null_space(run.dual.layer(name).keys) for name in LAYERS}
    images = run.digits.test_images
    basis = spaces[LAYERS[0]]
    drawn = torch.randn(INPUTS, len(basis), generator=torch.Generator().manual_seed(run.settings.seed)).double()
    inputs = torch.nn.functional.normalize(drawn, dim=1) @ basis * images.norm(dim=1).mean()
    return Orthogonal(
        directions={name: len(space) for name, space in spaces.items()},
        silent={n: tuple((run.dual.layer(n).keys == 0).all(0).nonzero()[:, 0].tolist()) for n in LAYERS},
        met=(_met("orthogonal to training", run, inputs.float()), _met("test digits", run, images)),
    )


def null_space(keys: Tensor) -> Tensor:
    """Orthonormal directions that no key (slots, d_in) has a part in, (directions, d_in), float64."""
    _, strengths, Vh = torch.linalg.svd(keys.double().T @ keys.double())
    free = strengths <= strengths[0] * len(strengths) * torch.finfo(torch.float64).eps
    basis: Tensor = Vh[free]
    return basis


def _met(inputs: str, run: Run, x: Tensor) -> Met:
    layer = run.dual.layer(LAYERS[0])
    weight = run.model.get_submodule(LAYERS[0]).get_parameter("weight").detach()
    moved = weight.double() - layer.initial_weight.double()
    return Met(
        inputs,
        float(layer.attention_weights(x).abs().max()),
        float((x @ layer.initial_weight.T).norm(dim=1).mean()),
        float(layer.attention(x).norm(dim=1).mean()),
        float((x.double() @ moved.T).norm(dim=1).mean()),
    )
