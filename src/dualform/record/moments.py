"""The checkpoints of a collection: their names, and how each comes into the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dualform.checkpoints import StateDict, read_checkpoint
from dualform.errors import RecordingError

Checkpoint = StateDict | str | os.PathLike[str] | Callable[[nn.Module], object]
"""A state dict, the path of one, or a function that loads weights into the model."""
Checkpoints = Sequence[Checkpoint] | Mapping[str, Checkpoint] | None
AS_IT_IS = "the model as it is"
CURE = "Give a function that loads it: checkpoints=[lambda model: …]."


@dataclass(frozen=True)
class Moment:
    """A checkpoint, not loaded yet."""

    name: str
    checkpoint: Checkpoint | None
    """None: the weights that the model has."""

    def load(self, model: nn.Module) -> None:
        """Bring its weights into the model."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return
        if callable(checkpoint):
            checkpoint(model)
        elif isinstance(checkpoint, Mapping):
            load_weights(model, checkpoint, self.name)
        else:
            load_weights(model, read_checkpoint(checkpoint), self.name)


def moments_of(checkpoints: Checkpoints) -> list[Moment]:
    """Return the checkpoints that the user gave, in their order."""
    if checkpoints is None:
        return [Moment(AS_IT_IS, None)]
    if _is_single(checkpoints):
        checkpoints = [cast(Checkpoint, checkpoints)]
    if isinstance(checkpoints, Mapping):
        named = [Moment(str(name), one) for name, one in checkpoints.items()]
    else:
        named = [Moment(_name(one, number), one) for number, one in enumerate(checkpoints)]
    if not named:
        raise RecordingError(
            "checkpoints=[]: expected at least one; leave it out to collect at the model's own weights."
        )
    names = [moment.name for moment in named]
    if len(set(names)) < len(names):
        raise RecordingError(
            f"checkpoints=: several have one name ({', '.join(names)}). Name them: checkpoints={{name: checkpoint}}."
        )
    return named


def _is_single(checkpoints: object) -> bool:
    """Return whether this is one checkpoint, and not several."""
    if isinstance(checkpoints, Mapping):
        return any(isinstance(value, Tensor) for value in checkpoints.values())
    return isinstance(checkpoints, (str, os.PathLike)) or callable(checkpoints)


def _name(checkpoint: Checkpoint, number: int) -> str:
    """The end of a path, which tells checkpoints apart and does not tell where on this machine they are; else a number."""
    if isinstance(checkpoint, (str, os.PathLike)):
        return "/".join(Path(checkpoint).parts[-2:])
    return f"checkpoint {number}"


@torch.no_grad()
def load_weights(model: nn.Module, weights: StateDict, name: str) -> None:
    """Load a state dict. Frozen weights may be missing, or must be as they are in the model."""
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    unknown = sorted(weights.keys() - own.keys())
    missing = _missing(own, weights)
    if unknown or missing:
        raise RecordingError(
            f"{name} does not fit the model: it has {_listed(unknown)} that the model does not have, and lacks {_listed(missing)}. {CURE}"
        )
    for key, value in weights.items():
        if own[key].shape != value.shape:
            raise RecordingError(
                f"{name} does not fit the model: {key!r} has shape {tuple(value.shape)} there and {tuple(own[key].shape)} in the model."
            )
        if _is_frozen(own[key]) and not torch.equal(own[key].cpu(), value.to("cpu", own[key].dtype)):
            raise RecordingError(
                f"{name} has another {key!r} than the model, where it is frozen: what is collected would belong to weights that nobody "
                f"stores. Load the model that was fine-tuned first."
            )
    model.load_state_dict(dict(weights), strict=False)


def _missing(own: Mapping[str, Any], weights: StateDict) -> list[str]:
    # A weight with several names is saved under one of them
    given = {id(own[name]) for name in weights if name in own}
    return [
        name
        for name, value in own.items()
        if isinstance(value, Tensor) and id(value) not in given and not _is_frozen(value)
    ]


def _is_frozen(value: Tensor) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    if not every:
        return "nothing"
    return ", ".join(map(repr, every[:4])) + (f" and {len(every) - 4} more" if len(every) > 4 else "")
