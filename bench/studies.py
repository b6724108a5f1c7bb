"""The runs that attribution is judged on: how each is trained, recorded or not, and its test examples.

digits-sgd, digits-adamw: 64-128-128-10 on 1500 of scikit-learn's digits. mnist-5k: 784-256-256-10. fashion-cnn: two convolutions
and a linear layer on 3000 images. aesop-lstm: a word-level language model on passages of Aesop's fables; its samples are passages.
aesop-lora: adapters on a Transformer of two blocks that was pretrained on WikiText-2, on longer passages of Aesop's fables.
"""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
import recording_networks
from dualform.evaluate.study import LogLikelihood, Margin, Study
from dualform_paper.data import images

TESTS = 100
PASSAGE = 32
"""Words of a passage."""
LONG_PASSAGE = 64
"""Of the fine-tuning, so that the gradient of a row is smaller than its slots, as with documents."""
PRETRAINED_ON = 1500
"""Passages of WikiText-2."""
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


def _words(*path: str) -> list[str]:
    text = Path(os.environ["DUALFORM_DATA"]).joinpath(*path).read_text(encoding="utf-8")
    text = text.split("*** START OF", 1)[-1].split("*** END OF", 1)[0]
    return re.findall(r"[a-z']+|[.,;:!?]", text.lower().replace("’", "'"))


@cache
def _vocabulary() -> dict[str, int]:
    """The frequent words of Aesop's fables and their numbers; every other word is 0."""
    counts = Counter(_words("aesop", "49010-0.txt"))
    frequent = [word for word, count in counts.most_common() if count >= RARE]
    return {word: place for place, word in enumerate(frequent, 1)}


def _passages(length: int, *path: str) -> Tensor:
    """(passages, length + 1): a text as numbers, cut."""
    number = _vocabulary()
    told = torch.tensor([number.get(word, 0) for word in _words(*path)])
    return told[: len(told) // (length + 1) * (length + 1)].reshape(-1, length + 1)


def _fables(length: int) -> Data:
    """Passages (n, length) of words, and the same shifted by one; every tenth passage is for the test."""
    passages = _passages(length, "aesop", "49010-0.txt")
    test = torch.arange(len(passages)) % 10 == 9
    train, test = passages[~test], passages[test][:TESTS]
    return Data(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], len(_vocabulary()) + 1)


@cache
def aesop() -> Data:
    return _fables(PASSAGE)


@cache
def long_aesop() -> Data:
    return _fables(LONG_PASSAGE)


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


@cache
def _pretrained(kinds: int) -> nn.Module:
    """A Transformer after two epochs of WikiText-2: the same in every process."""
    passages = _passages(LONG_PASSAGE, "wikitext-2", "wiki.valid.tokens")[:PRETRAINED_ON]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = recording_networks.GPT(kinds, width=64, heads=4, layers=2, length=LONG_PASSAGE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(2):
            for some in torch.split(torch.randperm(len(passages)), 16):
                optimizer.zero_grad()
                logits = model(passages[some, :-1])
                F.cross_entropy(logits.flatten(0, 1), passages[some, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return model


def lora(kinds: int) -> nn.Module:
    """Adapters of rank 8 on all linear maps of the blocks of the pretrained model."""
    from peft import LoraConfig, get_peft_model

    maps = ["attend", "project", "widen", "narrow"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=maps)
    adapted: nn.Module = get_peft_model(copy.deepcopy(_pretrained(kinds)), config)
    return adapted


def sgd(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adamw(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr
    )


SETTINGS = {
    "digits-sgd": Setting(digits, mlp(64, 128, 128), sgd(0.05), epochs=15, batch=50),
    "digits-adamw": Setting(digits, mlp(64, 128, 128), adamw(1e-3), epochs=15, batch=50),
    "mnist-5k": Setting(mnist, mlp(784, 256, 256), sgd(0.02), epochs=8, batch=50),
    "fashion-cnn": Setting(fashion, cnn, sgd(0.02), epochs=10, batch=50),
    "aesop-lstm": Setting(aesop, Lstm, adamw(1e-2), epochs=8, batch=32, repeats=2),
    "aesop-lora": Setting(long_aesop, lora, adamw(1e-2), epochs=4, batch=16),
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
    settings: Mapping[str, Any] | None = None,
    after_step: Callable[[nn.Module], None] | None = None,
    **columns: Tensor,
) -> nn.Module:
    """Train on some samples; recorded if a folder is given.

    labels, epochs: others than usual. settings: of `dualform.record`. after_step: gets the model after each. columns: by sample.
    """
    setting = SETTINGS[name]
    data = setting.data()
    labels = data.labels if labels is None else labels
    torch.manual_seed(seed)
    model = setting.network(data.kinds)
    optimizer = setting.optimizer(model)
    recorder = None if into is None else dualform.record(model, optimizer, into, overwrite=True, **(settings or {}))
    for _ in range(epochs or setting.epochs):
        for some in torch.split(ids[torch.randperm(len(ids))], setting.batch):
            if recorder is not None:
                label = {"label": labels[some]} if labels.dim() == 1 else {}
                recorder.batch(sample_id=some, **label, **{column: of[some] for column, of in columns.items()})
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.inputs[some]).flatten(0, -2), labels[some].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if after_step is not None:
                after_step(model)
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
