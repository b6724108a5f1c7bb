"""What a user names on the command line as MODULE:NAME, like a server's application."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TypeVar

from dualform.errors import QuestionError

T = TypeVar("T")


def find(text: str, kind: type[T], described: str) -> T:
    """What has this name: itself, or what a function of no arguments gives. The current folder is looked in, too."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise QuestionError(f"{text!r}: expected MODULE:NAME, e.g. my_training:my_{kind.__name__.lower()}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise QuestionError(f"{text!r} cannot be found: {error}.") from error
    made = found() if callable(found) and not isinstance(found, kind) else found
    if not isinstance(made, kind):
        raise QuestionError(
            f"{text!r} is {type(made).__name__}; expected {described}, or a function of no arguments that gives one."
        )
    return made
