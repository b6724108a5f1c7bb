"""A passage in Markdown, the token that matters in bold."""

from __future__ import annotations

import html
import re

from dualform.figures.retrieval import visible


def marked(before: str, token: str, after: str) -> str:
    """On one line, with nothing left that Markdown would read as its own."""
    return f"… {_plain(before).lstrip()}<b>{_plain(visible(token))}</b>{_plain(after).rstrip()} …"


def _plain(content: str) -> str:
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", html.escape(re.sub(r"\s+", " ", content), quote=False))
