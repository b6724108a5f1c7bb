"""What decides the outcome of an image experiment."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from dualform.errors import QuestionError

CLASSES = 10
LAYERS = ("0", "2", "4")
"""The linear layers of the network, which the paper calls layer-0, layer-1 and layer-2."""


@dataclass(frozen=True)
class Preset:
    """How the network is trained."""

    lr: float
    momentum: float
    clip: float | None
    """The largest norm of all gradients together."""


PRESETS = {
    "reference": Preset(3e-3, 0.9, 1.0),  # what the authors' code does
    "vanilla": Preset(3e-2, 0.0, None),  # what the paper's text says
}


@dataclass(frozen=True)
class Phase:
    """A stretch of training on one dataset, or on several mixed."""

    datasets: tuple[str, ...]
    steps: int


EXPERIMENTS = {
    "single-task": (Phase(("mnist",), 3000),),
    "joint": (Phase(("mnist", "fashion-mnist"), 5000),),
    "continual": (Phase(("mnist",), 3000), Phase(("fashion-mnist",), 3000)),
}
LONG = 7000
"""Steps of the second phase in the long variant of continual learning."""


@dataclass(frozen=True)
class Settings:
    """One training: everything that replays it."""

    experiment: str
    phases: tuple[Phase, ...]
    optimizer: str = "reference"
    seed: int = 0
    batch: int = 128
    width: int = 800
    raw_pixels: bool = False
    """Whether images enter as they are (0 to 1), as footnote 7 says, and not normalised, as the authors' code does."""
    train_images: int | None = None
    """Of each dataset, the first so many; default: all."""
    test_images: int | None = None
    top: int = 500
    """How many slots of each class the curves show."""
    every: int = 10
    """When the top slots were written is measured on every so many-th test image: 500 slots of each are counted."""

    @property
    def preset(self) -> Preset:
        """How it is trained."""
        return PRESETS[self.optimizer]

    @property
    def datasets(self) -> tuple[str, ...]:
        """All datasets, in the order in which they first appear."""
        return tuple(dict.fromkeys(name for phase in self.phases for name in phase.datasets))

    @property
    def steps(self) -> int:
        """Of all phases together."""
        return sum(phase.steps for phase in self.phases)

    @property
    def slots(self) -> int:
        """Of each layer."""
        return self.steps * self.batch

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def completed(kind: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings (a dataclass) from a file: what has been added since it was written had its default value then."""
    added = {field.name: field.default for field in fields(kind) if field.name not in settings}
    return settings | {name: default for name, default in added.items() if default is not MISSING}


@dataclass(frozen=True)
class Order:
    """What a person asks for on the command line."""

    experiment: str
    optimizer: str = "reference"
    seeds: int = 5
    first: int = 0
    """The first seed."""
    steps: int | None = None
    reverse: bool = False
    long: bool = False
    raw_pixels: bool = False
    every_image: bool = False

    @property
    def settings(self) -> Settings:
        """Of the first seed."""
        return settings_for(
            self.experiment,
            optimizer=self.optimizer,
            steps=self.steps,
            reverse=self.reverse,
            long=self.long,
            seed=self.first,
            raw_pixels=self.raw_pixels,
            **({"every": 1} if self.every_image else {}),
        )

    @property
    def name(self) -> str:
        """For a folder: each variant has its own."""
        variants = {"reverse": self.reverse, "long": self.long, "raw": self.raw_pixels}
        return "-".join([self.experiment, self.optimizer, *(name for name, on in variants.items() if on)])

    @property
    def command(self) -> str:
        """What was typed, or might have been."""
        numbers = {
            "--seeds": self.seeds,
            "--seed": self.first or None,
            "--steps": self.steps,
            "--optimizer": self.optimizer,
        }
        flags = {
            "--reverse": self.reverse,
            "--long": self.long,
            "--raw-pixels": self.raw_pixels,
            "--every-image": self.every_image,
        }
        words = [f"{option} {value}" for option, value in numbers.items() if value is not None]
        return " ".join(["dualform paper", self.experiment, *words, *(flag for flag, on in flags.items() if on)])


def settings_for(
    experiment: str,
    *,
    optimizer: str = "reference",
    steps: int | None = None,
    reverse: bool = False,
    long: bool = False,
    **others: Any,
) -> Settings:
    """The settings of an experiment. steps: of each phase, if not the paper's."""
    for what, value, known in (("experiment", experiment, EXPERIMENTS), ("optimizer", optimizer, PRESETS)):
        if value not in known:
            raise QuestionError(f"{what} {value!r}: expected one of {', '.join(known)}.")
    phases = EXPERIMENTS[experiment]
    if (reverse or long) and experiment != "continual":
        raise QuestionError("the reversed order and the long run are variants of continual learning.")
    if reverse:
        phases = tuple(
            replace(phase, datasets=other.datasets) for phase, other in zip(phases, phases[::-1], strict=True)
        )
    if long:
        phases = (phases[0], replace(phases[1], steps=LONG))
    if steps is not None:
        if steps < 1:
            raise QuestionError(f"steps {steps}: expected at least 1.")
        phases = tuple(replace(phase, steps=steps) for phase in phases)
    return Settings(experiment, phases, optimizer, **others)
