"""What other packages add to dualform. They name it in the entry points of their distribution, in one of these groups."""

from __future__ import annotations

from importlib import metadata

COMMANDS = "dualform.commands"
"""Commands of `dualform`: a function with Typer's annotations, under the name of the command."""
RUNS = "dualform.runs"
"""Runs that the explorer can open by themselves: `read(folder, settings, data)`, under the name of the run's settings file (JSON)."""
VIEWS = "dualform.views"
"""Views for `dualform.evaluate`: a dictionary of `dualform.evaluate.Peer`."""


def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group by their names. Nothing is imported before `load()`."""
    return {entry.name: entry for entry in metadata.entry_points(group=group)}
