"""The command line: `dualform --help` lists what there is to ask.

Exit codes: 0 all is well; 1 a parameter is not verified; 2 the command or the store cannot be used.
"""

from dualform.cli import questions, runs  # each enters its commands
from dualform.cli.application import app

__all__ = ["app", "questions", "runs"]
