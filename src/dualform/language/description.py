"""What is stored beside the recording of a language model: its text, the model's sizes, the names of layer and column.

`text.json` has everything but the tokens, which are in `text.safetensors`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from dualform.errors import NotRecordedError, StoreDamagedError
from dualform.language.shape import LAYER, Shape
from dualform.language.text import Part, Text
from dualform.store.files import files_at, read_if_there

if TYPE_CHECKING:
    from dualform.language.model import LanguageModel

JSON = "text.json"
TOKENS = "text.safetensors"
COLUMN = "text_position"
"""The column that says where in the training text a slot's token stands."""
PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Description:
    """What a recording does not hold itself: the text, the sizes of the model, the names of layer and column."""

    text: Text
    shape: Shape
    layer: str = LAYER
    column: str = COLUMN

    def model(self) -> LanguageModel:
        """A model of the right sizes; its weights come from the recording."""
        from dualform.language.model import build_model  # questions that totals answer need no PyTorch

        return build_model(self.shape, 0)


def write_description(folder: Path, description: Description) -> None:
    """Store a description beside a recording."""
    text = description.text
    parts = {name: part for name in PARTS if (part := getattr(text, name)) is not None}
    tensors: dict[str, Any] = {}
    for name, part in parts.items():
        tensors[f"{name}.ids"] = np.asarray(part.ids, np.int32)
        tensors[f"{name}.starts"] = np.asarray(part.starts, np.int64)
    save_file(tensors, folder / TOKENS)
    content = {
        "name": text.name,
        "unit": text.unit,
        "layer": description.layer,
        "column": description.column,
        "model": asdict(description.shape),
        "titles": {name: list(part.titles) for name, part in parts.items()},
        "vocabulary": list(text.vocabulary),
    }
    (folder / JSON).write_text(json.dumps(content, ensure_ascii=False, indent=0), encoding="utf-8")


def read_description(path: str | os.PathLike[str]) -> Description:
    """Read the description beside a recording, in a folder or at an address."""
    files = files_at(path)
    text = read_if_there(files, JSON)
    if text is None:
        raise NotRecordedError(
            f"{files.location} has no {JSON}: it does not say which text was trained on. Recordings of `dualform paper aesop` and "
            f"`dualform paper wikitext-2` have it; docs/language.md says how to write it for a text of your own."
        )
    try:
        content = json.loads(text)
        tensors = load(files.read(TOKENS))
        parts = {
            name: Part(tensors[f"{name}.ids"], tensors[f"{name}.starts"].tolist(), titles)
            for name, titles in content["titles"].items()
        }
        described = Text(content["name"], content["unit"], tuple(content["vocabulary"]), **parts)
        return Description(described, Shape(**content["model"]), content["layer"], content["column"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StoreDamagedError(f"{files.location}: {JSON} and {TOKENS} cannot be read: {error!r}.") from None
