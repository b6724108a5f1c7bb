"""Equations 15 to 17 and Geva et al. (2021): keys from running the trained network again, beside the recorded ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dualform_paper.asides.digits import Layer, Run
from dualform_paper.section import Section, percent, table
from dualform_paper.settings import CLASSES, LAYERS

TOP = 10


@dataclass(frozen=True)
class Agreement:
    """One layer; means over the test images, where nothing else is said."""

    layer: str
    cosine: float
    """Between a recorded key and the key of the same image in the trained network, over all slots."""
    first_epoch: float
    """The same over the slots of the first epoch."""
    last_epoch: float
    growth: float
    """How many times as long as in the first epoch an image's key is today."""
    overlap: float
    """The share of the ten most attended training images that both kinds of keys name."""
    correlation: float
    """Between the totals by class."""
    same_class: float
    """The share of test images for which both name the same class as most attended."""
    gap: float
    """‖W_0 + Σ e ⊗ (key of the trained network) − W‖ / ‖W − W_0‖"""
    cosine_by_step: tuple[float, ...]


@dataclass(frozen=True)
class Rerun:
    """How far keys made after training agree with those made during training."""

    accuracy: float
    accuracy_rerun: float
    """With keys of the trained network in the place of the recorded ones, in all layers."""
    block: float
    """The largest |W_2 W_1 x − Attention(W_1ᵀ, W_2, x)| (equation 17), for the first two layers, of the largest |W_2 W_1 x|."""
    writers: dict[str, float]
    """Of the ten images that excite a hidden unit most, the share among the ten that wrote most into its weights."""
    chance: float
    layers: tuple[Agreement, ...]

    def section(self) -> Section:
        """What is found, in words and as a table."""
        hidden = self.layers[1:]
        text = (
            f"Geva et al. run the trained network on its training data and compare activations. In the first layer these are the "
            f"recorded keys. Further up, a recorded key and its image's key today have a cosine of "
            f"{' and '.join(f'{a.first_epoch:.2f}' for a in hidden)} (layers {' and '.join(a.layer for a in hidden)}) in the first epoch and "
            f"{' and '.join(f'{a.last_epoch:.2f}' for a in hidden)} in the last. Of the ten most attended images they share "
            f"{' and '.join(percent(a.overlap) for a in hidden)}; the totals by class correlate by "
            f"{' and '.join(f'{a.correlation:.3f}' for a in hidden)}. By class the picture is the same, by image less so, and it is no longer the "
            f"network: with these keys, W₀ + Σ e ⊗ x misses what was learned by "
            f"{' and '.join(f'{a.gap:.1f}' for a in hidden)} times its norm (keys have grown {' and '.join(f'{a.growth:.1f}' for a in hidden)} "
            f"times as long since the first epoch), and accuracy goes from {percent(self.accuracy)} to "
            f"{percent(self.accuracy_rerun)}. The rows of W₁ as keys and the columns of W₂ as values give W₂W₁x to {self.block:.0e} "
            f"(equation 17). The ten images that excite a hidden unit most are among the ten that wrote most into it in "
            f"{' and '.join(percent(share) for share in self.writers.values())} of cases (layers {' and '.join(self.writers)}; by chance "
            f"{percent(self.chance)}): what a unit answers to is mostly not what made it."
        )
        header = (
            "layer", "cosine", "first epoch", "last epoch", "growth", "top-10 overlap", "correlation by class", "same class", "gap of eq. 13",
        )  # fmt: skip
        rows = [
            (
                a.layer, f"{a.cosine:.3f}", f"{a.first_epoch:.3f}", f"{a.last_epoch:.3f}", f"{a.growth:.2f}", percent(a.overlap),
                f"{a.correlation:.3f}", percent(a.same_class), f"{a.gap:.1e}",
            )
            for a in self.layers
        ]  # fmt: skip
        curves = {
            f"layer {a.layer}": {"x": list(range(len(a.cosine_by_step))), "y": list(a.cosine_by_step)}
            for a in self.layers
        }
        return Section(
            "Equations 15 to 17: keys of the trained network",
            f"{text}\n\n{table(header, rows)}",
            {
                **asdict(self),
                "curves": curves,
                "axes": {"x": "training step", "y": "cosine of recorded and re-run key"},
            },
        )


def measure(run: Run) -> Rerun:
    """Run the trained network on its training images and compare."""
    images, ids = run.digits.test_images, run.dual.rows["sample_id"].to_torch()
    others: dict[str, Layer] = {}
    layers = []
    for name in LAYERS:
        again = run.queries(name, run.digits.images[ids])
        layer = run.dual.layer(name)
        weight = layer.initial_weight + layer.values.T @ again
        others[name] = _linear(weight, layer.bias)
        layers.append(_agreement(run, name, again, weight))
    return Rerun(
        accuracy=run.digits.accuracy(run.answer(images)),
        accuracy_rerun=run.digits.accuracy(run.answer(images, others)),
        block=_block(run),
        writers={name: _writers(run, name) for name in LAYERS[:-1]},
        chance=TOP / len(run.digits.train),
        layers=tuple(layers),
    )


def _agreement(run: Run, name: str, again: Tensor, weight: Tensor) -> Agreement:
    layer, trained = run.dual.layer(name), run.model.get_submodule(name).get_parameter("weight").detach()
    queries, rows = run.queries(name, run.digits.test_images), run.dual.rows
    cosines = torch.cosine_similarity(layer.keys, again)
    steps = run.dual.end_step
    by_step = mean_by(cosines, rows["step"].to_torch(), steps)
    epoch = steps // run.settings.epochs
    early = rows["step"].to_torch() < epoch
    attention = run.dual.attend(run.digits.test_images)[name]
    named = attention.top(TOP, by="sample_id").partition_by("query", maintain_order=True)
    weights = queries @ again.T
    ids, labels = rows["sample_id"].to_torch(), rows["label"].to_torch()
    visits = sums_by(weights, ids, len(run.digits.images))
    # Sums rather than the frame's totals, so that both sides are added alike
    recorded, today = (sums_by(w, labels, CLASSES) for w in (layer.attention_weights(queries), weights))
    overlap = [
        len(set(frame["sample_id"].to_list()) & set(some.topk(TOP).indices.tolist())) / TOP
        for frame, some in zip(named, visits, strict=True)
    ]
    return Agreement(
        layer=name,
        cosine=float(cosines.mean()),
        first_epoch=float(by_step[:epoch].mean()),
        last_epoch=float(by_step[-epoch:].mean()),
        growth=float((again[early].norm(dim=1) / layer.keys[early].norm(dim=1)).mean()),
        overlap=sum(overlap) / len(overlap),
        correlation=float(correlations(recorded, today).mean()),
        same_class=float((recorded.argmax(1) == today.argmax(1)).double().mean()),
        gap=float((weight - trained).norm() / (trained - layer.initial_weight).norm()),
        cosine_by_step=tuple(by_step.tolist()),
    )


def mean_by(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean of values (n,) in each group, (groups,) float64."""
    counts = torch.bincount(group, minlength=groups)
    return torch.bincount(group, values.double(), minlength=groups) / counts


def sums_by(weights: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sums of the columns of weights (queries, slots) by group, (queries, groups) float64."""
    return torch.zeros(len(weights), groups, dtype=torch.float64).index_add_(1, group, weights.double())


def correlations(left: Tensor, right: Tensor) -> Tensor:
    """Pearson's, row by row."""
    return torch.cosine_similarity(left - left.mean(1, keepdim=True), right - right.mean(1, keepdim=True))


def _linear(weight: Tensor, bias: Tensor | None) -> Layer:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _block(run: Run) -> float:
    """Equation 17 for the first two layers: rows of W_1 are keys, columns of W_2 are values."""
    W_1, W_2 = (run.model.get_submodule(name).get_parameter("weight").detach() for name in LAYERS[:2])
    x = run.digits.test_images
    attention = sum((x @ key).unsqueeze(1) * value for key, value in zip(W_1, W_2.T, strict=True))
    plain = x @ (W_2 @ W_1).T
    return float((attention - plain).abs().max() / plain.abs().max())


def _writers(run: Run, name: str) -> float:
    """How many of the images that excite a unit of a layer most are among those that wrote most into its weights."""
    layer, ids = run.dual.layer(name), run.digits.train
    order = torch.argsort(run.dual.rows["sample_id"].to_torch(), stable=True)
    keys, values = (some[order].reshape(len(ids), -1, some.shape[1]) for some in (layer.keys, layer.values))
    written = torch.einsum("svo,svi->soi", values, keys).norm(dim=2)  # samples, visits, output, input
    with torch.no_grad():
        excited = run.model.get_submodule(name)(run.queries(name, run.digits.images[ids.sort().values]))
    both = [
        len(set(a.topk(TOP).indices.tolist()) & set(b.topk(TOP).indices.tolist()))
        for a, b in zip(written.T, excited.T, strict=True)
        if a.count_nonzero() >= TOP  # a unit that hardly ever fired has no ten writers
    ]
    return sum(both) / len(both) / TOP
