"""Models and tokenizers as a user names them on the command line: MODULE:NAME, or a folder that Hugging Face has written."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dualform.errors import QuestionError
from dualform.named import find

if TYPE_CHECKING:
    from torch import nn

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODULE:NAME",
        help="The architecture: a model, or a function that gives one. The module is imported, from the current folder too, and the function "
        "called: this executes their code. Or a folder with a config.json of Hugging Face; weights come from the recording.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="FOLDER",
        help="A folder with a tokenizer of Hugging Face, or MODULE:NAME, which executes code.",
        show_default="the model's folder",
    ),
]


def find_model(named: str) -> nn.Module:
    """Return the model that a user names."""
    from torch import nn

    if not (Path(named) / "config.json").is_file():
        return find(named, nn.Module, "an nn.Module")

    transformers: Any = import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(named)
        [architecture, *_] = config.architectures or ["none"]
        model: nn.Module = getattr(transformers, architecture)(config)
        return model
    except (OSError, ValueError, AttributeError) as error:
        raise QuestionError(f"{named}: its config.json names no model of Hugging Face: {error}.") from None


def find_tokenizer(named: str | None, model: str) -> Any:
    """Return the tokenizer that a user names; default: the one in the model's folder."""
    named = model if named is None else named
    transformers: Any = import_module("transformers")
    if not Path(named).is_dir():
        if named == model:
            raise QuestionError(
                "which tokenizer was the model trained with? Name its folder: --tokenizer runs/checkpoint-500; or --tokenizer MODULE:NAME."
            )
        kind: type = transformers.PreTrainedTokenizerBase
        return find(named, kind, "a tokenizer of Hugging Face")
    try:
        return transformers.AutoTokenizer.from_pretrained(named)
    except (OSError, ValueError) as error:
        raise QuestionError(f"{named} has no tokenizer of Hugging Face: {error}.") from None
