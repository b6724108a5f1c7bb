"""The demo: a small network learns digits while it is recorded, then two of its answers are explained.

    dualform demo

It uses the public API alone, as any training script would.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

import dualform
from dualform.dual.certificate import Certificate
from dualform.figures.results import Explained, LayerSources, LogitSplit, Source
from dualform.progress import Progress
from dualform.store.files import files_at

CLASSES = 10
SETTINGS = "demo.json"
"""Written beside the recording: what replays it. It also marks a folder that the demo may replace."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the outcome."""

    seed: int = 0
    epochs: int = 10
    batch: int = 50
    train_images: int = 1500
    width: int = 128
    lr: float = 0.05
    momentum: float = 0.9
    clip_norm: float = 1.0
    top: int = 8
    """How many training examples are shown for each layer."""


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) with mean 0 and deviation 1, labels (n,), and the numbers of those in each half."""

    images: Tensor
    labels: Tensor
    train: Tensor
    test: Tensor
    raw_mean: float
    """Of all pixels from 0 to 16, before they were normalised."""
    raw_deviation: float

    def picture(self, sample_id: int) -> Any:
        """One image as (8, 8), 0 where there is no ink."""
        image = self.images[sample_id].reshape(8, 8)
        return (image - self.images.min()).numpy()


@dataclass(frozen=True)
class Demo:
    """What the demo found."""

    folder: Path
    settings: Settings
    steps: int
    nbytes: int
    accuracy: float
    certificate: Certificate
    wrong: Explained
    """The first test digit with a wrong answer (if there is none: the one with the smallest margin)."""
    right: Explained
    """The first test digit of the same class with the right answer."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for scripts, without the images."""
        return {
            "folder": str(self.folder),
            "settings": asdict(self.settings),
            "steps": self.steps,
            "bytes": self.nbytes,
            "test_accuracy": self.accuracy,
            "certificate": json.loads(self.certificate.to_json()),
            "right": _plain(self.right),
            "wrong": _plain(self.wrong),
        }


def run(folder: Path, settings: Settings = Settings(), progress: Progress | None = None) -> Demo:
    """Train with recording, verify, explain. A recording of an earlier demo in the folder is replaced."""
    with _one_thread():
        digits = load(settings)
        model = train(folder, digits, settings, progress)
        dual = dualform.open(folder, model)
        certificate = dual.verify(progress=progress)
        with torch.no_grad():
            logits = model(digits.images[digits.test])
        right, wrong = choose(logits, digits.labels[digits.test])
        explained = explain(dual, model, digits, digits.test[[right, wrong]], settings)
        info = dual.info()
        return Demo(
            folder=folder,
            settings=settings,
            steps=info["steps"],
            nbytes=info["bytes"],
            accuracy=float((logits.argmax(1) == digits.labels[digits.test]).double().mean()),
            certificate=certificate,
            right=explained[0],
            wrong=explained[1],
        )


def load(settings: Settings) -> Digits:
    """scikit-learn's 1797 digits of 8 × 8 pixels (nothing is downloaded), split as the seed decides."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
    return Digits(
        images=(images - images.mean()) / images.std(),
        labels=torch.tensor(bunch.target),
        train=order[: settings.train_images],
        test=order[settings.train_images :],
        raw_mean=float(images.mean()),
        raw_deviation=float(images.std()),
    )


def network(settings: Settings, seed: int) -> nn.Module:
    """64-128-128-10 with its first weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, settings.width),
            nn.ReLU(),
            nn.Linear(settings.width, settings.width),
            nn.ReLU(),
            nn.Linear(settings.width, CLASSES),
        )


def train(folder: Path, digits: Digits, settings: Settings, progress: Progress | None = None) -> nn.Module:
    """Train by SGD with momentum and clipping, recorded."""
    model = network(settings, settings.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    ours = (folder / SETTINGS).exists()
    with dualform.record(model, optimizer, folder, overwrite=ours) as recorder:
        (folder / SETTINGS).write_text(
            json.dumps({"dualform": dualform.__version__, "torch": torch.__version__, **asdict(settings)}, indent=1)
        )
        _learn(model, optimizer, digits, digits.train, settings, settings.seed, recorder, progress)
    return model


def _learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    sample_ids: Tensor,
    settings: Settings,
    seed: int,
    recorder: dualform.Recorder | None = None,
    progress: Progress | None = None,
) -> None:
    shuffles = torch.Generator().manual_seed(seed)
    for epoch in range(settings.epochs):
        if progress is not None:
            progress("training", epoch, settings.epochs)
        order = sample_ids[torch.randperm(len(sample_ids), generator=shuffles)]
        for ids in torch.split(order, settings.batch):
            images, labels = digits.images[ids], digits.labels[ids]
            if recorder is not None:
                recorder.batch(sample_id=ids, label=labels)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            if recorder is not None:
                recorder.log(loss=loss.item())
    if progress is not None:
        progress("training", settings.epochs, settings.epochs)


def study(path: str | os.PathLike[str], tests: int = 100) -> dualform.Study:
    """How a recorded demo is trained again, and its first test digits: what dualform.evaluate needs."""
    stored = json.loads(files_at(path).read(SETTINGS))
    settings = Settings(**{field.name: stored[field.name] for field in fields(Settings)})
    digits = load(settings)
    test = digits.test[:tests]
    again = _Again(settings)
    target = dualform.Margin(digits.labels[test])
    return dualform.Study(network(settings, 0), again, digits.images[test], target, again.samples)


@dataclass(frozen=True)
class _Again:
    """Trains the demo's network on some of its digits; other processes can be sent it."""

    settings: Settings

    def __call__(self, sample_ids: Tensor, seed: int) -> nn.Module:
        model = network(self.settings, seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.settings.lr, momentum=self.settings.momentum)
        _learn(model, optimizer, _loaded(self.settings), sample_ids, self.settings, seed)
        return model

    def samples(self, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        digits = _loaded(self.settings)
        return digits.images[sample_ids], digits.labels[sample_ids]


_loaded = cache(load)
"""Once in each process that trains again."""


def choose(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """Places of a right and a wrong answer: the first wrong one, and the first right one of the same class.

    Without a wrong answer, the one with the smallest margin; without a right one in its class, the first
    right one of any.
    """
    fits = logits.argmax(1) == labels
    best = logits.topk(2, dim=1).values
    wrong = int((~fits).nonzero()[0]) if not fits.all() else int((best[:, 0] - best[:, 1]).argmin())
    others = fits.clone()
    others[wrong] = False
    same = (others & (labels == labels[wrong])).nonzero()
    found = same if len(same) else others.nonzero()
    return (int(found[0]) if len(found) else wrong), wrong


def explain(
    dual: dualform.Dual, model: nn.Module, digits: Digits, sample_ids: Tensor, settings: Settings
) -> list[Explained]:
    """Where the answers to some images come from."""
    images, labels = digits.images[sample_ids], digits.labels[sample_ids]
    with torch.no_grad():
        logits = model(images)
    answers = logits.argmax(1)
    attention = dual.attend(images)
    last = dual.layers[-1]
    tops = {name: _distinct(attention[name].top(settings.top * settings.epochs), settings.top) for name in dual.layers}
    totals = {name: _by_class(attention[name].total("label")) for name in dual.layers}
    splits: dict[str, list[LogitSplit]] = {}
    for what, units in (("answer", answers), ("truth", labels)):
        contributions = dual.contributions(images, target=units)[last]
        parts, initial = _by_class(contributions.total("label")), contributions.parts()["initial"]
        splits[what] = [
            LogitSplit(int(unit), initial[i], parts[i], float(logits[i, unit])) for i, unit in enumerate(units)
        ]
    explained = []
    for i, sample_id in enumerate(sample_ids.tolist()):
        layers = tuple(
            LayerSources(name, tuple(_source(digits, row) for row in tops[name][i]), totals[name][i])
            for name in dual.layers
        )
        both = (splits["answer"][i], splits["truth"][i])
        explained.append(
            Explained(
                sample_id=sample_id,
                image=digits.picture(sample_id),
                label=int(labels[i]),
                answer=int(answers[i]),
                layers=layers,
                splits=both if answers[i] != labels[i] else both[:1],
            )
        )
    return explained


def _distinct(top: pl.DataFrame, k: int) -> list[list[dict[str, Any]]]:
    """For each query the best visit of its k best examples: each fills at most as many places as visits."""
    best = top.unique(["query", "sample_id"], keep="first", maintain_order=True)
    return [part.head(k).to_dicts() for part in best.partition_by("query", maintain_order=True)]


def _by_class(totals: pl.DataFrame) -> list[tuple[float, ...]]:
    """For each query, one total for each class; 0 for a class that was never trained on."""
    found = []
    for part in totals.partition_by("query", maintain_order=True):
        by_label = dict(zip(part["label"].to_list(), part["total"].to_list(), strict=True))
        found.append(tuple(by_label.get(label, 0.0) for label in range(CLASSES)))
    return found


def _source(digits: Digits, row: dict[str, Any]) -> Source:
    return Source(row["sample_id"], row["label"], row["step"], row["weight"], digits.picture(row["sample_id"]))


def _plain(explained: Explained) -> dict[str, Any]:
    return {
        "sample_id": explained.sample_id,
        "label": explained.label,
        "answer": explained.answer,
        "layers": [
            {
                "layer": layer.layer,
                "top": [{k: v for k, v in vars(source).items() if k != "image"} for source in layer.top],
                "totals": list(layer.totals),
            }
            for layer in explained.layers
        ],
        "logits": [{**asdict(split), "total": split.total, "remainder": split.remainder} for split in explained.splits],
    }


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Products as small as these are slower with several threads, much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
