"""What a user names on the command line as MODULE:NAME, like a server's application."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from dualform.errors import DualformError, QuestionError

T = TypeVar("T")


def find(text: str, kind: type[T], described: str) -> T:
    """What has this name: itself, or what a function of no arguments gives. The current folder is looked in, too.

    This imports the module and calls the function, so it runs their code.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise QuestionError(f"{text!r}: expected MODULE:NAME, e.g. my_training:my_{kind.__name__.lower()}.")
    found = _attribute(text, module, name)
    if isinstance(found, kind):
        return found
    expected = f"expected {described}, or a function of no arguments that gives one."
    if not _may_be_called(found, kind):
        raise QuestionError(f"{text!r} is {_what(found)}; {expected}")
    made = _run(lambda: found(), f"calling {text!r}")
    if not isinstance(made, kind):
        raise QuestionError(f"{text!r} gives {_what(made)}; {expected}")
    return made


def _attribute(text: str, module: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = _run(lambda: importlib.import_module(module), f"importing {module!r}", (ImportError,))
        return getattr(imported, name)
    except (ImportError, AttributeError) as error:
        hint = " Leave out the .py." if module.endswith(".py") else ""
        raise QuestionError(f"{text!r} cannot be found: {error}.{hint}") from error


def _run(work: Callable[[], Any], doing: str, allowed: tuple[type[Exception], ...] = ()) -> Any:
    """Run code of the user; whatever it raises becomes one clear error, except Ctrl-C, our own errors and what is allowed."""
    try:
        return work()
    except allowed:
        raise
    except (KeyboardInterrupt, DualformError):
        raise
    except SystemExit as error:
        raise QuestionError(f"{doing} ended the program (sys.exit({error.code!r})).") from error
    except BaseException as error:
        raise QuestionError(f"{doing} failed: {type(error).__name__}: {error}.") from error


def _may_be_called(found: object, kind: type) -> bool:
    """Whether calling it without arguments could give what is wanted. Functions of Python's own library (os.system) are not even tried."""
    if not callable(found) or inspect.isbuiltin(found):
        return False
    package = str(getattr(found, "__module__", "")).partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return False
    if isinstance(found, type) and not issubclass(found, kind):
        return False
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):  # it needs arguments, or says nothing about them
        return False
    return True


def _what(found: object) -> str:
    """What something is, in words."""
    if inspect.ismodule(found):
        return f"the module {found.__name__}"
    if isinstance(found, type):
        return f"the class {found.__name__}{_arguments(found)}"
    if callable(found) and hasattr(found, "__name__"):
        return f"the function {found.__name__}{_arguments(found)}"
    return f"an object of type {type(found).__name__}"


def _arguments(found: Callable[..., object]) -> str:
    try:
        return str(inspect.signature(found))
    except (TypeError, ValueError):
        return "(…)"
