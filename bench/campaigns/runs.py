"""Tiny trainings that can be recorded, stopped anywhere and gone on with: everything follows from a seed and a step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.record.recorder import Recorder

SAMPLES, FEATURES, CLASSES, ROWS = 16, 5, 3, 4
STEPS = 18
"""How long a training is."""
WORDS = 7


class Words(nn.Module):
    """An embedding, whose keys are numbers, and a layer whose keys repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, features) → logits."""
        output: Tensor = self.head(self.words((x.abs() * 3).long().clamp(max=WORDS - 1)).tanh().mean(1))
        return output


def mlp() -> nn.Module:
    """Two linear layers; the keys of the first one repeat, since samples do."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def cnn() -> nn.Module:
    """A convolution, whose keys are feature maps."""
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and decay."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The Adam family: state is needed to go on."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@dataclass(frozen=True)
class Kind:
    """What is trained and how it is recorded."""

    name: str
    network: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seal_every: int = 4
    """After how many steps the loop calls recorder.seal()."""

    @property
    def keeps_slots(self) -> bool:
        """Whether the store has slots."""
        return bool(self.settings.get("keep", "slots") != "totals")

    @property
    def has_totals(self) -> bool:
        """Whether totals are kept while recording."""
        return "totals" in self.settings


SMALL = {"chunk_bytes": 1200}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("slots", mlp, sgd, SMALL),
        Kind("adamw", mlp, adamw, SMALL),
        Kind("float16", mlp, sgd, {**SMALL, "dtype": "float16"}, seal_every=7),
        Kind("words", Words, adamw, {**SMALL, "chunk_bytes": 400}),
        Kind("maps", cnn, sgd, {**SMALL, "curvature": True}),
        Kind("slots and totals", mlp, sgd, {**SMALL, "totals": ["label"]}),
        Kind("totals only", mlp, sgd, {"keep": "totals", "totals": ["label", ("label", "half")]}, seal_every=3),
    )
}


@dataclass
class State:
    """A training between two steps: what a checkpoint holds."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]


class Training:
    """A network and its optimizer, at some step."""

    def __init__(self, kind: Kind, seed: int, state: State | None = None):
        torch.manual_seed(seed)
        self.kind = kind
        self.seed = seed
        self.model = kind.network()
        self.optimizer = kind.optimizer(self.model)
        self.done = 0
        generator = torch.Generator().manual_seed(seed)
        self._inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self._labels = torch.arange(SAMPLES) % CLASSES
        if state is not None:
            self.model.load_state_dict(state.model)
            self.optimizer.load_state_dict(copy.deepcopy(state.optimizer))
            self.done = state.step

    def state(self) -> State:
        """A checkpoint."""
        return State(self.done, copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict()))

    def record(self, path: Path, **settings: Any) -> Recorder:
        """Begin to record it."""
        return dualform.record(self.model, self.optimizer, path, **{**self.kind.settings, **settings})

    def step(self, recorder: Recorder) -> None:
        """One step. Which samples it takes depends on the seed and the number of the step alone."""
        draw = random.Random(f"{self.seed} {self.done}")
        ids = torch.tensor([draw.randrange(SAMPLES) for _ in range(ROWS)])
        half = "first" if self.done < STEPS // 2 else "second"
        recorder.batch(sample_id=ids, label=self._labels[ids], half=half)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self._inputs[ids]), self._labels[ids])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        recorder.log(loss=loss.item(), seed=self.seed)
        self.done += 1

    def go_on(self, recorder: Recorder, to: int = STEPS, sealed: Callable[[int], object] | None = None) -> None:
        """Train up to a step, sealing now and then. sealed: called with the number of steps that each seal() promises."""
        while self.done < to:
            self.step(recorder)
            if self.done % self.kind.seal_every == 0:
                promised = recorder.seal()
                if sealed is not None:
                    sealed(promised)
