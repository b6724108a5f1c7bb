"""`python -m dualform`: the command line."""

from dualform.cli import app

if __name__ == "__main__":
    app(prog_name="dualform")
