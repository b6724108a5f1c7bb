"""Passages in a terminal: the token that matches is marked, and what cannot be seen is shown."""

from __future__ import annotations

import unicodedata

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dualform.language.answers import PromptAnswer
from dualform.language.text import LINE_END, Passage

MARK = "bold reverse"
BRACKETS = ("⟦", "⟧")
"""Around what is marked, where there are no styles: in files and pipes."""
VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", LINE_END: "⏎"}
"""Tokens that could not be seen when marked."""


def show_answer(console: Console, answer: PromptAnswer) -> None:
    """Print the prompt, how the model continues it, and a line for each passage."""
    shown = visible(answer.query)
    ends = ("", "") if console.is_terminal else BRACKETS
    before = _line(answer.prompt[: len(answer.prompt) - len(answer.query)])
    prompt = Text("… " if len(before) > 120 else "").append(before[-120:]).append(f"{ends[0]}{shown}{ends[1]}", MARK)
    console.print(Text("prompt: ", style="bold") + prompt, soft_wrap=True)
    following = ", ".join(f"{visible(token)} {share:.0%}" for token, share in answer.following)
    console.print(Text("goes on: ", style="bold") + Text(following), soft_wrap=True)
    title = f"Highest of {answer.positions:,} training positions; {answer.score}"
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    single = any(one.step is not None for one in answer.passages)
    for name, justify in (
        ("", "right"),
        ("score", "right"),
        ("step" if single else "visits", "right"),
        ("position", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("in", overflow="fold", max_width=28)
    table.add_column("passage", overflow="fold", ratio=1)
    for one in answer.passages:
        count = one.visits if one.step is None else one.step
        table.add_row(
            str(one.rank),
            f"{one.score:.4g}",
            f"{count:,}",
            f"{one.passage.position:,}",
            Text(one.passage.title),
            marked(one.passage, ends),
        )
    console.print(table)


def marked(passage: Passage, ends: tuple[str, str] = ("", "")) -> Text:
    """A passage on one line, with its token marked, and between `ends` where there are no styles."""
    token = f"{ends[0]}{visible(passage.token)}{ends[1]}"
    return Text(_line(passage.before)).append(token, MARK).append(_line(passage.after))


def visible(token: str) -> str:
    """A token as it can be seen."""
    return VISIBLE.get(token) or _printable(token)


def _line(text: str) -> str:
    return _printable(text.replace("\n", "⏎"))


def _printable(text: str) -> str:
    """Without characters that would move the cursor or colour the terminal."""
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
