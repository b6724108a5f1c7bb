"""Small random networks for the differential fuzz campaign, and their data."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, FEATURES, CLASSES, WORDS, SIDE = 9, 4, 3, 6, 4

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "none": nn.Identity}


@dataclass(frozen=True)
class Spec:
    """What a network is made of; it can be built from this again and again."""

    kind: str
    """"vectors", "positions", "words" or "images"."""
    width: int
    depth: int
    bias: bool
    activation: str
    norm: str
    """"none", "layer", "rms", "batch" or "group"."""
    dropout: float
    residual: bool
    twice: bool
    """Whether the body is called twice."""
    length: int
    """How many positions there are."""
    body: str
    """Of words: "linear", "lstm", "gru", "rnn", "attention" or "encoder"."""
    places: str
    """Of words: "none", "by row" or "shared" position embeddings."""
    padding: bool
    """Of words: whether word 0 is padding."""
    tied: bool
    """Of words: whether the output layer has the weights of the embedding."""
    groups: int
    """Of images: of the convolution."""
    stride: int

    @property
    def rows_interact(self) -> bool:
        """Whether the gradient of one row's loss runs through the slots of others."""
        return self.norm == "batch"

    @property
    def predicts_words(self) -> bool:
        """Whether there is a prediction for each position, and not for each row."""
        return self.kind == "words" and self.tied


def draw_spec(draw: random.Random) -> Spec:
    """A network."""
    kind = draw.choice(["vectors", "vectors", "positions", "words", "words", "images"])
    norms = {"vectors": ["layer", "rms", "batch"], "images": ["batch", "group"]}.get(kind, ["layer", "rms"])
    return Spec(
        kind=kind,
        width=draw.choice([2, 4, 6]),
        depth=draw.randint(1, 3),
        bias=draw.random() < 0.8,
        activation=draw.choice(list(ACTIVATIONS)),
        norm=draw.choice(norms) if draw.random() < 0.4 else "none",
        dropout=draw.choice([0.0, 0.0, 0.0, 0.3]),
        residual=draw.random() < 0.3,
        twice=draw.random() < 0.15,
        length=draw.choice([1, 2, 3, 5]),
        body=draw.choice(["linear", "lstm", "gru", "rnn", "attention", "encoder"]),
        places=draw.choice(["none", "by row", "shared"]),
        padding=draw.random() < 0.3,
        tied=draw.random() < 0.3,
        groups=draw.choice([1, 1, 2]),
        stride=draw.choice([1, 2]),
    )


def normalisation(name: str, width: int, *, of_images: bool = False) -> nn.Module:
    """A normalisation of so many features or channels."""
    if name == "none":
        return nn.Identity()
    if name == "layer":
        return nn.LayerNorm(width)
    if name == "rms":
        return nn.RMSNorm(width)
    if name == "group":
        return nn.GroupNorm(2 if width % 2 == 0 else 1, width)
    return nn.BatchNorm2d(width) if of_images else nn.BatchNorm1d(width)


class Block(nn.Module):
    """A linear map, a normalisation, an activation, dropout; around a residual connection."""

    def __init__(self, spec: Spec, inputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, spec.width, bias=spec.bias)
        self.norm = normalisation(spec.norm, spec.width)
        self.activation = ACTIVATIONS[spec.activation]()
        self.dropout = nn.Dropout(spec.dropout)
        self.residual = spec.residual and inputs == spec.width

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, width)."""
        y: Tensor = self.dropout(self.activation(self.norm(self.linear(x))))
        return x + y if self.residual else y


class Vectors(nn.Module):
    """Blocks on vectors, or on each position of (rows, positions, features)."""

    def __init__(self, spec: Spec):
        super().__init__()
        sizes = [FEATURES, *[spec.width] * spec.depth]
        self.blocks = nn.ModuleList(Block(spec, size) for size in sizes[:-1])
        self.again = spec.twice and spec.depth > 1
        self.head = nn.Linear(spec.width, CLASSES, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """→ (rows, classes)."""
        for block in self.blocks:
            x = block(x)
        if self.again:
            x = self.blocks[-1](x)
        output: Tensor = self.head(x.mean(1) if x.dim() == 3 else x)
        return output


class Words(nn.Module):
    """Embeddings, a body over the positions, and predictions for the row or for each position."""

    def __init__(self, spec: Spec):
        super().__init__()
        width = 4  # a multiple of the number of heads
        self.spec = spec
        self.words = nn.Embedding(WORDS, width, padding_idx=0 if spec.padding else None)
        self.places = nn.Embedding(spec.length, width) if spec.places != "none" else None
        self.body = _body(spec, width)
        self.norm = normalisation(spec.norm, width)
        self.head = nn.Linear(width, WORDS if spec.tied else CLASSES, bias=spec.bias)
        if spec.tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """(rows, positions) → (rows, classes), or (rows, positions, words)."""
        x = self.words(words)
        if self.places is not None:
            ids = torch.arange(words.shape[1])[None]
            x = x + self.places(ids if self.spec.places == "shared" else ids.expand(len(words), -1))
        for _ in range(2 if self.spec.twice and self.spec.body == "linear" else 1):
            x = self._through_body(x)
        x = self.norm(x)
        output: Tensor = self.head(x if self.spec.tied else x.mean(1))
        return output

    def _through_body(self, x: Tensor) -> Tensor:
        if self.spec.body == "attention":
            y: Tensor = self.body(x, x, x, need_weights=False)[0]
            return y
        found = self.body(x)
        y = found[0] if isinstance(found, tuple) else found
        return y.tanh() if self.spec.body == "linear" else y


def _body(spec: Spec, width: int) -> nn.Module:
    if spec.body in ("lstm", "gru", "rnn"):
        kind: Any = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[spec.body]
        recurrent: nn.Module = kind(width, width, num_layers=min(spec.depth, 2), bias=spec.bias, batch_first=True)
        return recurrent
    if spec.body == "attention":
        return nn.MultiheadAttention(width, 2, dropout=spec.dropout, bias=spec.bias, batch_first=True)
    if spec.body == "encoder":
        return nn.TransformerEncoderLayer(width, 2, 6, dropout=spec.dropout, batch_first=True)
    return nn.Linear(width, width, bias=spec.bias)


class Images(nn.Module):
    """Convolutions, then a linear layer."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.first = nn.Conv2d(1, spec.width, 2, padding=1, bias=spec.bias)
        self.norm = normalisation(spec.norm, spec.width, of_images=True)
        self.second = nn.Conv2d(spec.width, spec.width, 2, stride=spec.stride, groups=spec.groups, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]()
        self.head = nn.Linear(spec.width, CLASSES, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 1, side, side) → (rows, classes)."""
        x = self.activation(self.norm(self.first(x)))
        x = self.activation(self.second(x))
        output: Tensor = self.head(x.mean((2, 3)))
        return output


NETWORKS: dict[str, type[nn.Module]] = {"vectors": Vectors, "positions": Vectors, "words": Words, "images": Images}


def build(spec: Spec, seed: int, dtype: torch.dtype) -> nn.Module:
    """The network, always the same for a seed."""
    torch.manual_seed(seed)
    return NETWORKS[spec.kind](spec).to(dtype)


@dataclass(frozen=True)
class Data:
    """Inputs and targets of all samples."""

    inputs: Tensor
    labels: Tensor
    """(samples,), or (samples, positions) where words are predicted; −100 where there is none."""

    def losses(self, output: Tensor, ids: Tensor) -> Tensor:
        """The loss of each row."""
        labels = self.labels[ids]
        if labels.dim() == 1:
            return F.cross_entropy(
                output.float() if output.dtype == torch.bfloat16 else output, labels, reduction="none"
            )
        each = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        return each.reshape(labels.shape).sum(1)


def data(spec: Spec, seed: int, dtype: torch.dtype) -> Data:
    """The samples of a network."""
    generator = torch.Generator().manual_seed(seed)
    if spec.kind == "words":
        words = torch.randint(0, WORDS, (SAMPLES, spec.length + 1), generator=generator)
        if not spec.predicts_words:
            return Data(words[:, :-1], torch.arange(SAMPLES) % CLASSES)
        targets = words[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        return Data(words[:, :-1], targets)
    shape = {"vectors": (FEATURES,), "positions": (spec.length, FEATURES), "images": (1, SIDE, SIDE)}[spec.kind]
    inputs = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return Data(inputs, torch.arange(SAMPLES) % CLASSES)
