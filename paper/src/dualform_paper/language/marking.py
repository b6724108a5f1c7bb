"""A passage in Markdown, the token that matters in bold."""

from __future__ import annotations

import html
import re

from dualform.language.terminal import visible


def marked(before: str, token: str, after: str) -> str:
    """On one line, with nothing left that Markdown would read as its own."""
    return f"… {escaped(before).lstrip()}<b>{escaped(visible(token))}</b>{escaped(after).rstrip()} …"


def escaped(content: str) -> str:
    """As it is, on one line, also in a cell of a table."""
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", html.escape(re.sub(r"\s+", " ", content), quote=False))
