"""A hook of MkDocs: the page of the command line is written from the commands themselves, when the site is built."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

PAGE = "reference/cli.md"
MARK = "<!-- commands -->"
SOURCE = Path(__file__).parents[1] / "src"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the commands in the place of the mark."""
    if page.file.src_uri != PAGE:
        return markdown
    return markdown.replace(MARK, commands())


def commands() -> str:
    """Every command of dualform as Markdown: what it does, its arguments and its options."""
    sys.path.insert(0, str(SOURCE))
    import typer

    from dualform.cli import app

    group: Any = typer.main.get_command(app)
    context: Any = group.context_class(group, info_name="dualform")
    sections = []
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        sections.append(section(command, command.context_class(command, info_name=f"dualform {name}", parent=None)))
    return "\n\n".join(sections)


def section(command: Any, context: Any) -> str:
    """One command: its usage, its help and a table of what it takes."""
    usage = " ".join([context.info_name, *command.collect_usage_pieces(context)])
    lines = [f"## {context.info_name}", "", inspect.cleandoc(command.help or ""), "", "```sh", usage, "```", ""]
    rows = [row for parameter in command.get_params(context) if (row := table_row(parameter))]
    if rows:
        lines += ["| | | default |", "|---|---|---|", *rows]
    return "\n".join(lines)


def table_row(parameter: Any) -> str | None:
    """One argument or option as a line of a table; None if it is hidden."""
    if getattr(parameter, "hidden", False):
        return None
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
    else:
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
    cells = [f"`{name}`", parameter.help or "", default_of(parameter)]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def default_of(parameter: Any) -> str:
    """The default as `--help` shows it: a word of the command's own, a value, or nothing."""
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return shown
    default = parameter.default
    if parameter.required:
        return "required"
    if default is None or callable(default) or default is False or default == ():
        return ""
    return f"`{getattr(default, 'value', default)}`"
