"""Remark 2.3: the same keys and values, read by softmax attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dualform_paper.asides.digits import Layer, Run
from dualform_paper.section import Section, percent, table
from dualform_paper.settings import LAYERS

Weighting = Callable[[Tensor], Tensor]


def softmax(weights: Tensor) -> Tensor:
    """As the paper writes it: softmax over all slots, for weights (queries, slots)."""
    return torch.softmax(weights, 1)


def same_total(weights: Tensor) -> Tensor:
    """The attention that the dot products give in all, shared out by softmax."""
    return torch.softmax(weights, 1) * weights.sum(1, keepdim=True)


READINGS: dict[str, Weighting] = {"nothing": torch.zeros_like, "softmax": softmax, "same total": same_total}
"""Nothing: the initial part and the bias alone."""


@dataclass(frozen=True)
class Reading:
    """One layer read by softmax; means over the test images."""

    layer: str
    entropy: float
    """In bits; all slots alike would be log2(slots)."""
    slots_attended: float
    """2^entropy of each image, their median: over so many slots alike the entropy would be the same."""
    right_dot: float
    """The share of the dot attention that slots of the right class get."""
    right_softmax: float
    cosine: float
    """Between what dot attention and softmax attention read."""
    size: float
    """‖softmax attention‖ / ‖dot attention‖"""
    accuracy: dict[str, float]
    """With this layer read so, the others as they are."""


@dataclass(frozen=True)
class SoftmaxReading:
    """What changes if softmax attention reads what dot attention wrote."""

    slots: int
    accuracy: float
    """Of the network as it is."""
    layers: tuple[Reading, ...]
    all_layers: dict[str, float]
    """The accuracy with all layers read so."""

    def section(self) -> Section:
        """What is found, in words and as a table."""
        last = self.layers[-1]
        text = (
            f"Over the {self.slots:,} recorded slots of a layer, V softmax(Kᵀq) is an average of tiny values where V Kᵀq is "
            f"their sum: what it reads is {self.layers[0].size:.0e} (first layer) to {last.size:.0e} (last) times as large. "
            f"Read so in all layers, the network is right on {percent(self.all_layers['softmax'])} of the test digits instead of "
            f"{percent(self.accuracy)}; with no memory at all, on {percent(self.all_layers['nothing'])}. If softmax shares out the total "
            f"that the dot products give, it is right on {percent(self.all_layers['same total'])}. In the last layer the distribution has "
            f"{last.entropy:.1f} of the {math.log2(self.slots):.1f} bits that all slots alike would have, and gives "
            f"{percent(last.right_softmax)} to slots of the right class, where dot attention gives them {percent(last.right_dot)}: it finds "
            f"neighbours, but it is not the function that was trained. The last layer's initial weights alone, on top of the "
            f"trained hidden layers, are right on {percent(last.accuracy['nothing'])}, so accuracy says little about its memory."
        )
        header = (
            "layer", "entropy (bits)", "slots attended", "right class, dot", "right class, softmax", "cosine of the outputs",
            "size", *(f"accuracy, {how}" for how in READINGS),
        )  # fmt: skip
        rows = [
            (
                r.layer, f"{r.entropy:.1f}", f"{r.slots_attended:,.0f}", percent(r.right_dot), percent(r.right_softmax),
                f"{r.cosine:.2f}", f"{r.size:.1e}", *map(percent, r.accuracy.values()),
            )
            for r in self.layers
        ]  # fmt: skip
        rows.append(("all", "", "", "", "", "", "", *map(percent, self.all_layers.values())))
        return Section(
            "Remark 2.3: softmax over the same keys and values", f"{text}\n\n{table(header, rows)}", asdict(self)
        )


def measure(run: Run) -> SoftmaxReading:
    """Read each layer, and all of them, by softmax."""
    images = run.digits.test_images

    def accuracy(*names: str) -> dict[str, float]:
        return {
            how: run.digits.accuracy(run.answer(images, {name: reader(run, name, weighting) for name in names}))
            for how, weighting in READINGS.items()
        }

    layers = []
    for name in LAYERS:
        layer, queries = run.dual.layer(name), run.queries(name, images)
        weights, values = layer.attention_weights(queries), layer.values
        shares, right = softmax(weights), _of_right_class(run)
        bits = entropy(shares)
        dot, soft = weights @ values, shares @ values
        layers.append(
            Reading(
                layer=name,
                entropy=float(bits.mean()),
                slots_attended=float((2**bits).median()),
                right_dot=float(((weights * right).sum(1) / weights.sum(1)).mean()),
                right_softmax=float((shares * right).sum(1).mean()),
                cosine=float(torch.cosine_similarity(dot, soft).mean()),
                size=float((soft.norm(dim=1) / dot.norm(dim=1)).mean()),
                accuracy=accuracy(name),
            )
        )
    return SoftmaxReading(
        slots=run.dual.layer(LAYERS[0]).slots,
        accuracy=run.digits.accuracy(run.answer(images)),
        layers=tuple(layers),
        all_layers=accuracy(*LAYERS),
    )


def reader(run: Run, name: str, weighting: Weighting) -> Layer:
    """A layer whose attention weights are changed on their way to the values."""
    layer = run.dual.layer(name)
    values, bias = layer.values, layer.bias
    assert bias is not None

    def read(x: Tensor) -> Tensor:
        return x @ layer.initial_weight.T + weighting(layer.attention_weights(x)) @ values + bias

    return read


def entropy(shares: Tensor) -> Tensor:
    """In bits, for distributions (queries, slots)."""
    nats: Tensor = torch.special.entr(shares.double()).sum(1)
    return nats / math.log(2)


def _of_right_class(run: Run) -> Tensor:
    """(tested, slots): 1 where a slot has the image's label."""
    of_slots = run.dual.rows["label"].to_torch()
    return (run.digits.labels[run.digits.test].unsqueeze(1) == of_slots).float()
