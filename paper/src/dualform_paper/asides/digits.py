"""The one recording that the asides share: scikit-learn's digits, plain gradient descent, seconds of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import dualform
from dualform.progress import Progress
from dualform_paper.network import two_hidden
from dualform_paper.settings import CLASSES

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """Everything that decides the outcome."""

    seed: int = 0
    epochs: int = 10
    batch: int = 50
    train_images: int = 1500
    test_images: int | None = None
    """Default: all that are left."""
    width: int = 64
    lr: float = 0.5


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) from 0 to 1, labels (n,), and the numbers of those that are trained and tested on."""

    images: Tensor
    labels: Tensor
    train: Tensor
    test: Tensor

    @property
    def test_images(self) -> Tensor:
        """(tested, 64)"""
        return self.images[self.test]

    def accuracy(self, logits: Tensor) -> float:
        """The share of right answers on the test images."""
        return float((logits.argmax(1) == self.labels[self.test]).double().mean())


@dataclass(frozen=True)
class Run:
    """A network 64-64-64-10 and how it was trained."""

    settings: Settings
    digits: Digits
    model: nn.Sequential
    dual: dualform.Dual

    @torch.no_grad()
    def queries(self, layer: str, images: Tensor) -> Tensor:
        """What reaches a layer of the trained network."""
        found: Tensor = self.model[: int(layer)](images)
        return found

    @torch.no_grad()
    def answer(self, images: Tensor, others: Mapping[str, Layer] | None = None) -> Tensor:
        """The logits; `others`: functions in the place of some layers."""
        for name, module in self.model.named_children():
            images = (others or {}).get(name, module)(images)
        return images


def load(settings: Settings) -> Digits:
    """scikit-learn's 1797 digits of 8 × 8 pixels (nothing is downloaded), split as the seed decides."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(settings.seed))
    test = order[settings.train_images :]
    return Digits(
        images=torch.tensor(bunch.data, dtype=torch.float32) / 16,
        labels=torch.tensor(bunch.target),
        train=order[: settings.train_images],
        test=test if settings.test_images is None else test[: settings.test_images],
    )


def batches(digits: Digits, settings: Settings) -> Iterator[Tensor]:
    """The numbers of the images of each step; every epoch sees each of them once."""
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.epochs):
        order = digits.train[torch.randperm(len(digits.train), generator=generator)]
        yield from torch.split(order, settings.batch)


def network(settings: Settings) -> nn.Sequential:
    """Two hidden layers, as in the paper, but small."""
    return two_hidden(64, settings.width, CLASSES, settings.seed)


def prepare(folder: Path, settings: Settings = Settings(), progress: Progress | None = None) -> Run:
    """Train with recording. A recording that is in the folder is replaced."""
    digits, model = load(settings), network(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    steps = settings.epochs * -(-len(digits.train) // settings.batch)
    with dualform.record(model, optimizer, folder, overwrite=True) as recorder:
        for number, ids in enumerate(batches(digits, settings)):
            recorder.batch(sample_id=ids, label=digits.labels[ids])
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(digits.images[ids]), digits.labels[ids])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            recorder.log(loss=loss.item())
            if progress is not None:
                progress("training", number + 1, steps)
    return Run(settings, digits, model, dualform.open(folder, model))
