"""Weights of a model in a file, as people save and publish them: a state dict by PyTorch or safetensors, or a folder of Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dualform.errors import DataError

StateDict = Mapping[str, Tensor]

INDEX = "model.safetensors.index.json"
"""Of a folder of Hugging Face whose weights are in several files."""
IN_FOLDERS = ("model.safetensors", "pytorch_model.bin", "model.pt")
NESTED = ("state_dict", "model_state_dict", "model", "module")
"""Where training loops keep the model's weights in a file that has more."""
EXPECTED = (
    "expected a state dict in a .safetensors or .pt file, or a folder with model.safetensors or pytorch_model.bin"
)


def read_checkpoint(path: str | os.PathLike[str]) -> StateDict:
    """Return the weights in a file or folder, by name, on the CPU. No code in it is run."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise DataError(f"{path}: there is no such checkpoint; {EXPECTED}.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    return _read_torch(path)


def _read_folder(folder: Path) -> StateDict:
    index = folder / INDEX
    if index.exists():
        return _read_shards(folder, index)
    for name in IN_FOLDERS:
        if (folder / name).exists():
            return read_checkpoint(folder / name)
    raise DataError(f"{folder} holds no checkpoint; {EXPECTED}.")


def _read_shards(folder: Path, index: Path) -> StateDict:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise DataError(f"{index} names no files: {type(error).__name__}: {error}.") from None
    tensors: dict[str, Tensor] = {}
    for name in names:
        # A name is that of a file in this folder, and never a path to somewhere else
        tensors |= _read_safetensors(folder / Path(str(name)).name)
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}.") from None


def _read_torch(path: Path) -> StateDict:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is in the file
        # The first line says what is wrong; the others say how to run the code in the file
        reason = str(error).splitlines()[0] if str(error) else ""
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {reason} Here {EXPECTED}.") from None
    return state_dict_in(content, str(path))


def state_dict_in(content: Any, named: str) -> StateDict:
    """Return the state dict in what a file held: itself, or under one of the names that training loops use."""
    places = [content]
    if isinstance(content, Mapping):
        places += [content[name] for name in NESTED if name in content]
    for found in places:
        if isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values()):
            return found
    raise DataError(f"{named} holds no state dict, a dictionary of tensors by name; {EXPECTED}.")
