"""What a user names on the command line as MODULE:NAME, like a server's application."""

from __future__ import annotations

import importlib
import os
import sys

from torch import nn

from dualform.errors import QuestionError


def model(text: str) -> nn.Module:
    """The model of a name: itself, or what a function of no arguments gives. The current folder is looked in, too."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise QuestionError(f"--model {text}: expected MODULE:NAME, e.g. my_training:network.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise QuestionError(f"--model {text} cannot be found: {error}.") from error
    made = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(made, nn.Module):
        raise QuestionError(
            f"--model {text} is {type(made).__name__}; expected an nn.Module, or a function of no arguments that gives one."
        )
    return made
