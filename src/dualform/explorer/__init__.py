"""The explorer: a page in the browser that shows where predictions come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dualform
from dualform.explorer.drawing import fit_drawing
from dualform.explorer.server import Server, is_interactive
from dualform.explorer.session import Session
from dualform.explorer.showing import Show
from dualform.explorer.subject import ClassNames, Draw, Subject, check_sizes, subject
from dualform.explorer.text import Language

__all__ = ["Language", "Server", "Session", "Subject", "check_sizes", "explore", "fit_drawing", "subject"]


def explore(
    dual: dualform.Dual,
    train: Any = None,
    test: Any = None,
    *,
    class_names: ClassNames = None,
    show: Show | str | None = None,
    by: str | Sequence[str] = "sample_id",
    label: str = "label",
    draw: Draw | None = None,
    language: Language | None = None,
    tokenizer: Any = None,
    title: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
    block: bool | None = None,
) -> Server:
    """Serve the page; `Dual.explore` says what the arguments are."""
    found = subject(
        dual, train, test,
        class_names=class_names, by=by, label=label, show=show, draw=draw, title=title, language=language, tokenizer=tokenizer,
    )  # fmt: skip
    server = Server(Session(found), host=host, port=port)
    if block is None:
        block = not is_interactive()
    server.start().announce(ends=block)
    if browser:
        server.open_browser()
    if block:
        server.wait()
    return server
