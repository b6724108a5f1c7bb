"""Checkpoints of a language model's training: safetensors files beside its recording.

A checkpoint is saved before the recording is sealed at its step, and those before it are removed afterwards: whenever the
training is killed, one of the checkpoints fits what the recording holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dualform.language.model import LanguageModel, State

NAME = "checkpoint-{step}.safetensors"
ABOUT = "trained"
"""The key of a file's metadata that holds plain data as JSON."""


def save(
    folder: Path, step: int, model: LanguageModel, optimizer: torch.optim.Adam, state: State, about: dict[str, Any]
) -> None:
    """Save all that a training needs to go on. about: plain data that is saved with it."""
    tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"adam.{name}.{key}"] = value
    tensors["state.hidden"] = state[0].contiguous()
    tensors["state.cell"] = state[1].contiguous()
    metadata = {ABOUT: json.dumps(about)}
    replace_file(folder / NAME.format(step=step), lambda path: save_file(tensors, path, metadata))


def load(path: Path, model: LanguageModel, optimizer: torch.optim.Adam) -> State:
    """Load a checkpoint into model and optimizer; returns the LSTM's state."""
    tensors = load_file(path)
    model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
    for name, parameter in model.named_parameters():
        prefix = f"adam.{name}."
        optimizer.state[parameter] = {
            key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
        }
    return tensors["state.hidden"], tensors["state.cell"]


def about(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint."""
    with safe_open(path, "pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()[ABOUT])
    return found


def by_step(folder: Path) -> dict[int, Path]:
    """All checkpoints in a folder."""
    paths = folder.glob(NAME.format(step="*"))
    return {int(path.stem.removeprefix("checkpoint-")): path for path in paths}


def remove_all(folder: Path, *, but: int | None = None) -> None:
    """Remove the checkpoints of all steps, but for one."""
    for step, path in by_step(folder).items():
        if step != but:
            path.unlink()


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file so that it is whole or not there at all, even after a power failure."""
    unfinished = path.with_name(f".{path.name}")
    write(unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)
    if os.name != "nt":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
