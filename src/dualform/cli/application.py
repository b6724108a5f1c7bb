"""The application that all commands belong to."""

from __future__ import annotations

from typing import Annotated

import typer

from dualform.cli.plugins import PluginGroup
from dualform.version import __version__

app = typer.Typer(cls=PluginGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dualform {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Record how a PyTorch network is trained; then ask, exactly, where a prediction comes from."""
