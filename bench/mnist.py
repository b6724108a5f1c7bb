"""The paper's MNIST run (784-800-800-10, batch 128, SGD lr 3e-3, momentum 0.9, clipping at 1.0), shared by benchmarks."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 128
STEPS = 3000


def data(part: str = "train", dataset: str = "mnist") -> tuple[Tensor, Tensor]:
    """Images (n, 784), normalised by the training set's mean and deviation (of MNIST), and labels (n,)."""
    folder = os.environ.get("DUALFORM_DATA")
    if not folder:
        sys.exit("Set DUALFORM_DATA to a folder that holds mnist/train-images-idx3-ubyte.gz and its companions.")

    def read(name: str, header: int) -> Tensor:
        content = gzip.decompress((Path(folder) / dataset / name).read_bytes())
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).copy())

    prefix = {"train": "train", "test": "t10k"}[part]
    images = read(f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 784).float().div_(255)
    return (images - 0.1307) / 0.3081, read(f"{prefix}-labels-idx1-ubyte.gz", 8).long()


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The paper's network."""
    torch.manual_seed(seed)
    layers = (nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))
    return nn.Sequential(*layers).to(dtype)


def optimizer_for(model: nn.Module) -> torch.optim.SGD:
    """The optimizer that the authors' code used."""
    return torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    seed: int = 0,
    before: Callable[[Tensor, Tensor], None] = lambda ids, labels: None,
) -> Iterator[None]:
    """Train without end, a step at a time; `before` gets the sample numbers and the labels of each batch."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    while True:
        if len(order) < BATCH:
            order = torch.randperm(len(images), generator=generator)
        ids, order = order[:BATCH], order[BATCH:]
        x, y = images[ids], labels[ids]
        before(ids, y)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    steps: int = STEPS,
    seed: int = 0,
    before: Callable[[Tensor, Tensor], None] = lambda ids, labels: None,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """Train for some steps; `after` gets the number of updates so far."""
    endless = training(model, optimizer, images, labels, seed=seed, before=before)
    for step in range(steps):
        next(endless)
        after(step + 1)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right predictions."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
