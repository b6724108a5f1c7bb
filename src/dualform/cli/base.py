"""What all commands share: one line for an error, progress, JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from dualform.errors import DualformError
from dualform.progress import Progress

FAILED, UNUSABLE = 1, 2
EXTRAS = {
    "sklearn": "demo",
    "matplotlib": "demo",
    "bm25s": "evaluate",
    "pooch": "paper",
    "fastapi": "explorer",
    "uvicorn": "explorer",
    "plotly": "explorer",
    "transformers": "transformers",
    "obstore": "remote",
    "ray": "ray",
}
"""Packages that only some commands need, and the extra that brings them."""


P = ParamSpec("P")


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """What the library raises or warns of on purpose becomes one line on standard error."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
                command(*args, **kwargs)
        except BrokenPipeError:
            raise  # whoever read standard output has gone: nothing is wrong with the store
        except (DualformError, OSError) as error:
            problem = " ".join(str(error).split())
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").split(".")[0])
            if extra is None:
                raise
            problem = f"this command needs {error.name}: pip install 'dualform[{extra}]'."
        else:
            return
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(UNUSABLE)

    return run


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The folder given to dualform.record(), or an address: s3://bucket/folder.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with mnist/, fashion-mnist/, aesop/, wikitext-2/.", show_default="DUALFORM_DATA, cache, download"
    ),
]


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars on standard error, gone when the work is done; none where nobody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        # Bars(disable=True) would do, but prints an empty line with Rich 13.7
        yield lambda what, done, total: None
        return

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def print_json(content: Any) -> None:
    """On standard output."""
    print(json.dumps(content, indent=1))
