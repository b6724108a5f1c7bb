"""The runs that attribution is judged on: how each is trained, recorded or not, and its test examples.

digits-sgd, digits-adamw: 64-128-128-10 on 1500 of scikit-learn's digits. mnist-5k: 784-256-256-10. fashion-cnn: two convolutions
and a linear layer on 3000 images. aesop-lstm: a word-level language model on passages of Aesop's fables; its samples are passages.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.evaluate.study import LogLikelihood, Margin, Study
from dualform_paper.data import images

TESTS = 100
PASSAGE = 32
"""Words of a passage."""
RARE = 8
"""Words that occur less often are one word."""


@dataclass(frozen=True)
class Data:
    """Inputs and labels of the training samples, whose ids are their places, and of the test examples."""

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    kinds: int
    """Classes, or words of the vocabulary."""


@dataclass(frozen=True)
class Setting:
    """One run: everything that decides its outcome but the seed."""

    data: Callable[[], Data]
    network: Callable[[int], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    epochs: int
    batch: int
    subsets: int = 100
    repeats: int = 3


class Lstm(nn.Module):
    """Embedding, LSTM, decoder."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 32)
        self.rnn = nn.LSTM(32, 64, batch_first=True)
        self.decoder = nn.Linear(64, words)

    def forward(self, words: Tensor) -> Tensor:
        """(rows, length) → logits of the next words."""
        output: Tensor = self.decoder(self.rnn(self.embedding(words))[0])
        return output


@cache
def digits() -> Data:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels, labels = torch.tensor(bunch.data, dtype=torch.float32), torch.tensor(bunch.target)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500 : 1500 + TESTS]
    pixels = (pixels - pixels.mean()) / pixels.std()
    return Data(pixels[train], labels[train], pixels[test], labels[test], 10)


def _idx(name: str, count: int, shape: tuple[int, ...]) -> Data:
    def part(which: str, number: int) -> tuple[Tensor, Tensor]:
        found = images(name, which)
        pixels = torch.from_numpy(found.pixels[:number].copy()).float().div(255)
        return pixels.reshape(number, *shape), torch.from_numpy(found.labels[:number].copy())

    inputs, labels = part("train", count)
    test_inputs, test_labels = part("test", TESTS)
    mean, deviation = inputs.mean(), inputs.std()
    return Data((inputs - mean) / deviation, labels, (test_inputs - mean) / deviation, test_labels, 10)


@cache
def mnist() -> Data:
    return _idx("mnist", 5000, (784,))


@cache
def fashion() -> Data:
    return _idx("fashion-mnist", 3000, (1, 28, 28))


@cache
def aesop() -> Data:
    """Passages (n, 32) of words, and the same shifted by one; every tenth passage is for the test."""
    text = (Path(os.environ["DUALFORM_DATA"]) / "aesop" / "49010-0.txt").read_text(encoding="utf-8")
    text = text.split("*** START OF", 1)[1].split("*** END OF", 1)[0]
    words = re.findall(r"[a-z']+|[.,;:!?]", text.lower().replace("’", "'"))
    frequent = [word for word, count in Counter(words).most_common() if count >= RARE]
    number = {word: place for place, word in enumerate(frequent, 1)}
    told = torch.tensor([number.get(word, 0) for word in words])
    passages = told[: len(told) // (PASSAGE + 1) * (PASSAGE + 1)].reshape(-1, PASSAGE + 1)
    test = torch.arange(len(passages)) % 10 == 9
    train, test = passages[~test], passages[test][:TESTS]
    return Data(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], len(frequent) + 1)


def mlp(*sizes: int) -> Callable[[int], nn.Module]:
    def network(kinds: int) -> nn.Module:
        layers: list[nn.Module] = []
        for d_in, d_out in zip(sizes, (*sizes[1:], kinds), strict=True):
            layers += [nn.Linear(d_in, d_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return network


def cnn(kinds: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 5 * 5, kinds),
    )  # fmt: skip


def sgd(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adamw(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr)


SETTINGS = {
    "digits-sgd": Setting(digits, mlp(64, 128, 128), sgd(0.05), epochs=15, batch=50),
    "digits-adamw": Setting(digits, mlp(64, 128, 128), adamw(1e-3), epochs=15, batch=50),
    "mnist-5k": Setting(mnist, mlp(784, 256, 256), sgd(0.02), epochs=8, batch=50),
    "fashion-cnn": Setting(fashion, cnn, sgd(0.02), epochs=10, batch=50),
    "aesop-lstm": Setting(aesop, Lstm, adamw(1e-2), epochs=8, batch=32, repeats=2),
}


@dataclass(frozen=True)
class Train:
    """Trains a setting's network on some samples; picklable, for other processes."""

    name: str

    def __call__(self, ids: Tensor, seed: int) -> nn.Module:
        return run(self.name, ids, seed)


@dataclass(frozen=True)
class Samples:
    """A setting's samples by their ids."""

    name: str

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        data = SETTINGS[self.name].data()
        return data.inputs[ids], data.labels[ids]


def run(
    name: str,
    ids: Tensor,
    seed: int,
    into: Path | None = None,
    labels: Tensor | None = None,
    *,
    epochs: int | None = None,
    **columns: Tensor,
) -> nn.Module:
    """Train on some samples; recorded if a folder is given. labels, epochs: others than usual; columns: by sample."""
    setting = SETTINGS[name]
    data = setting.data()
    labels = data.labels if labels is None else labels
    torch.manual_seed(seed)
    model = setting.network(data.kinds)
    optimizer = setting.optimizer(model)
    axes = {name: 0 for name, _ in model.named_children()} if data.inputs.dim() == 2 and labels.dim() == 2 else {}
    recorder = None if into is None else dualform.record(model, optimizer, into, overwrite=True, batch_axis=axes)
    for _ in range(epochs or setting.epochs):
        for some in torch.split(ids[torch.randperm(len(ids))], setting.batch):
            if recorder is not None:
                kept = (
                    {"label": labels[some]} if labels.dim() == 1 else {"word": data.inputs[some], "next": labels[some]}
                )
                recorder.batch(sample_id=some, **kept, **{column: of[some] for column, of in columns.items()})
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.inputs[some]).flatten(0, -2), labels[some].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    if recorder is not None:
        recorder.close()
    return model


def study(name: str) -> Study:
    """How the run is trained again and judged."""
    setting = SETTINGS[name]
    data = setting.data()
    target: Margin | LogLikelihood
    target = Margin(data.test_labels) if data.labels.dim() == 1 else LogLikelihood(data.test_labels)
    return Study(setting.network(data.kinds), Train(name), data.test_inputs, target, Samples(name))
