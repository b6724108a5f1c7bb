"""Commands that ask where their slots are to be scored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from dualform.cli.models import find_model

if TYPE_CHECKING:
    import dualform


class ExecutorName(str, Enum):
    """The executors that have a name."""

    threads = "threads"
    processes = "processes"
    ray = "ray"


Executor = Annotated[
    ExecutorName | None,
    typer.Option(
        "--executor",
        help="Where slots are scored; ray: on the cluster at RAY_ADDRESS, else on this machine.",
        show_default="one thread",
    ),
]


@contextlib.contextmanager
def closing_dual(run: str, model: str, executor: ExecutorName | None) -> Iterator[dualform.Dual]:
    """Open a run; whatever its executor has started ends with the block."""
    import dualform

    dual = dualform.open(run, find_model(model), executor=None if executor is None else executor.value)
    try:
        yield dual
    finally:
        dual.close()
