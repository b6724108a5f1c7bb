"""Commands that other packages bring: found by their entry points, and loaded when they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from dualform import plugins
from dualform.cli.base import UNUSABLE, one_line_errors


@dataclass(frozen=True)
class OptionalCommand:
    """A command of ours that comes with an extra."""

    extra: str
    help: str

    @property
    def cure(self) -> str:
        """How to install it."""
        return f"pip install 'dualform[{self.extra}]'"


OPTIONAL = {"paper": OptionalCommand("paper", "Run the paper's experiments.")}
"""They are listed in `dualform --help` even where they are not installed, with how to install them."""


class PluginGroup(TyperGroup):
    """A group of commands that also has those of other packages."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Our own commands, then those of other packages."""
        own = super().list_commands(ctx)
        others = {**plugins.entry_points(plugins.COMMANDS), **OPTIONAL}
        return [*own, *sorted(name for name in others if name not in own)]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """The command of this name; None if there is none."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = plugins.entry_points(plugins.COMMANDS).get(cmd_name)
        if entry is not None:
            try:
                return _command(cmd_name, one_line_errors(entry.load()))
            except Exception as error:  # other commands must work, whatever is wrong with this one
                return _unusable(cmd_name, f"the command comes from {entry.value}, which cannot be loaded: {error!r}.")
        if cmd_name in OPTIONAL:
            missing = OPTIONAL[cmd_name]
            problem = f"`dualform {cmd_name}` is not installed: {missing.cure}."
            return _unusable(cmd_name, problem, help=f"{missing.help} Not installed: {missing.cure}.")
        return None


def _command(name: str, function: Callable[..., None], **options: Any) -> Any:
    """Turn a function into a command, as `@app.command(name)` does."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, **options)(function)
    return typer.main.get_command(app)


def _unusable(name: str, problem: str, help: str | None = None) -> Any:
    """A command that takes any arguments and says what is wrong."""

    def say(ctx: typer.Context) -> None:
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(UNUSABLE)

    any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True}
    shown = escape(help or problem)  # Typer takes brackets for markup
    return _command(name, say, help=shown, context_settings=any_arguments)
