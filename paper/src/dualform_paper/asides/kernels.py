"""Remark 3.2: a network that is in its dual form while it learns, with other kernels than the dot product."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from dualform.progress import Progress
from dualform_paper.asides.digits import Digits, Run, Settings, batches
from dualform_paper.asides.digits import network as ordinary
from dualform_paper.section import Section, percent, table
from dualform_paper.settings import CLASSES

Kernel = Callable[[Tensor, int], Tensor]
"""From dot products (rows, slots) and their dimension to attention weights."""

KERNELS: dict[str, Kernel] = {
    "dot": lambda products, d: products,
    "polynomial": lambda products, d: products.square() / d,
    "softmax": lambda products, d: torch.softmax(products / math.sqrt(d), 1),
    "softmax × slots": lambda products, d: torch.softmax(products / math.sqrt(d), 1) * products.shape[1],
}
RATES = {
    "dot": (0.2, 0.5, 1.0),
    "polynomial": (1.0, 2.0, 4.0),
    "softmax": (0.5, 1000.0, 3000.0, 10_000.0),
    "softmax × slots": (2.0, 4.0, 8.0),
}
"""Learning rates that are tried; the one with the smallest loss on the training images counts."""
FORMULAS = {
    "dot": "x·y",
    "polynomial": "(x·y)²/d",
    "softmax": "softmax(x·y/√d)",
    "softmax × slots": "T softmax(x·y/√d)",
}


class KernelLinear(nn.Module):
    """W_0 x + Σ_t e_t K(x_t, x) + b: a layer that keeps every key and value instead of adding them up."""

    initial_weight: Tensor
    bias: Tensor
    keys: Tensor
    values: Tensor
    _key: Tensor
    _error: Tensor

    def __init__(self, d_in: int, d_out: int, kernel: Kernel):
        super().__init__()
        start = nn.Linear(d_in, d_out)
        self.kernel = kernel
        self.register_buffer("initial_weight", start.weight.detach())
        self.register_buffer("bias", start.bias.detach())
        self.register_buffer("keys", torch.empty(0, d_in))
        self.register_buffer("values", torch.empty(0, d_out))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, d_in) → (rows, d_out)"""
        output = x @ self.initial_weight.T + self.bias
        if len(self.keys):
            output = output + self.kernel(x @ self.keys.T, x.shape[1]) @ self.values
        if torch.is_grad_enabled():
            self._key = x.detach()
            output = output.requires_grad_()
            output.register_hook(self._note)  # type: ignore[no-untyped-call]
        return output

    def learn(self, rate: float, bias_rate: float) -> None:
        """Keep what the last backward pass brought: a key and a value for each row."""
        self.keys = torch.cat([self.keys, self._key])
        self.values = torch.cat([self.values, -rate * self._error])
        self.bias = self.bias - bias_rate * self._error.sum(0)

    def _note(self, error: Tensor) -> None:
        self._error = error


@dataclass(frozen=True)
class Trained:
    """One training."""

    kernel: str
    rate: float
    losses: tuple[float, ...]
    """Of each epoch, on its training images; not finite if the rate was too large."""
    accuracy: float
    """On the test images."""


@dataclass(frozen=True)
class OtherKernels:
    """The same network and batches with each kernel and learning rate."""

    epochs: int
    tested: int
    difference: float
    """The largest |logit of the network with the dot product − logit of the ordinary one|, at the run's own rate."""
    trained: tuple[Trained, ...]

    def best(self, kernel: str) -> Trained:
        """The training with the smallest loss in its last epoch."""
        mine = [t for t in self.trained if t.kernel == kernel]
        return min(mine, key=lambda t: t.losses[-1] if math.isfinite(t.losses[-1]) else math.inf)

    def section(self) -> Section:
        """What is found, in words and as a table."""
        dot, polynomial, soft, times = (self.best(kernel) for kernel in KERNELS)
        text = (
            f"Every layer keeps its keys and values while it learns, and its error signals go back through the kernel; "
            f"{self.epochs} epochs, one seed, {self.tested} test digits. With the dot product this is the ordinary network (logits differ by {self.difference:.0e} at most). At its "
            f"best rate of those tried, the polynomial kernel comes to a loss of {polynomial.losses[-1]:.2f} and an accuracy of "
            f"{percent(polynomial.accuracy)}, the dot product to {dot.losses[-1]:.2f} and {percent(dot.accuracy)}. Softmax comes to "
            f"{soft.losses[-1]:.2f} and {percent(soft.accuracy)}, at a rate of {soft.rate:g}: its weights add up to 1, so each new slot "
            f"takes from all others. Times the number of slots it comes to {times.losses[-1]:.2f} and {percent(times.accuracy)}. So other "
            f"kernels can be trained, if the weights of old slots do not shrink as new ones come. One seed and so few test digits do not "
            f"tell which is best, and every forward pass runs over all that was ever learned."
        )
        rows = []
        for t in self.trained:
            mark = " (best)" if t == self.best(t.kernel) else ""
            loss = f"{t.losses[-1]:.3f}" if math.isfinite(t.losses[-1]) else "diverged"
            rows.append((f"{t.kernel}: {FORMULAS[t.kernel]}", f"{t.rate:g}{mark}", loss, percent(t.accuracy)))
        header = ("kernel", "learning rate", "training loss, last epoch", "test accuracy")
        epochs = list(range(1, self.epochs + 1))
        curves = {kernel: {"x": epochs, "y": list(self.best(kernel).losses)} for kernel in KERNELS}
        return Section(
            "Remark 3.2: other kernels",
            f"{text}\n\n{table(header, rows)}",
            {**asdict(self), "curves": curves, "axes": {"x": "epoch", "y": "training loss"}},
        )


def measure(run: Run, epochs: int = 6, progress: Progress | None = None) -> OtherKernels:
    """Train with each kernel and rate, on the images of a run, with its batches and its initialisation."""
    settings = replace(run.settings, epochs=epochs)
    tries = [(kernel, rate) for kernel in KERNELS for rate in RATES[kernel]]
    trained = []
    difference = _difference(run.digits, settings)
    for number, (kernel, rate) in enumerate(tries):
        if progress is not None:
            progress("training with other kernels", number, len(tries))
        trained.append(_trained(kernel, rate, run.digits, settings))
    if progress is not None:
        progress("training with other kernels", len(tries), len(tries))
    return OtherKernels(epochs, len(run.digits.test), difference, tuple(trained))


def network(settings: Settings, kernel: Kernel) -> nn.Sequential:
    """64-64-64-10 in its dual form, initialised as the ordinary one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return nn.Sequential(
            KernelLinear(64, settings.width, kernel),
            nn.ReLU(),
            KernelLinear(settings.width, settings.width, kernel),
            nn.ReLU(),
            KernelLinear(settings.width, CLASSES, kernel),
        )


def train(model: nn.Sequential, rate: float, digits: Digits, settings: Settings) -> list[float]:
    """Train in the dual form; the loss of each step. The bias, whose key is 1 with any kernel, learns at the run's own rate."""
    losses = []
    for ids in batches(digits, settings):
        loss = nn.functional.cross_entropy(model(digits.images[ids]), digits.labels[ids])
        loss.backward()  # type: ignore[no-untyped-call]
        for layer in model:
            if isinstance(layer, KernelLinear):
                layer.learn(rate, settings.lr)
        losses.append(float(loss.detach()))
    return losses


def train_ordinary(model: nn.Module, digits: Digits, settings: Settings) -> None:
    """The same training of an ordinary network, for comparison."""
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    for ids in batches(digits, settings):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits.images[ids]), digits.labels[ids]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _difference(digits: Digits, settings: Settings) -> float:
    dual, primal = network(settings, KERNELS["dot"]), ordinary(settings)
    with torch.enable_grad():
        train(dual, settings.lr, digits, settings)
        train_ordinary(primal, digits, settings)
    return float((dual(digits.test_images) - primal(digits.test_images)).abs().max())


def _trained(kernel: str, rate: float, digits: Digits, settings: Settings) -> Trained:
    model = network(settings, KERNELS[kernel])
    losses = torch.tensor(train(model, rate, digits, settings))
    with torch.no_grad():
        accuracy = digits.accuracy(model(digits.test_images))
    return Trained(kernel, rate, tuple(losses.reshape(settings.epochs, -1).mean(1).tolist()), accuracy)
