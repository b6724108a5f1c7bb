"""Commands of other packages: found by entry points, with a message where they are missing or broken."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dualform import plugins
from dualform.cli import app
from dualform.errors import QuestionError


def call(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def install(monkeypatch):
    """Make some commands the only ones that other packages bring; each is given by what its entry point loads."""

    def entry(name, load):
        return SimpleNamespace(name=name, value=f"elsewhere:{name}", load=load)

    def install(**loads):
        found = {name: entry(name, load) for name, load in loads.items()}
        monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == plugins.COMMANDS else {})

    return install


@pytest.mark.parametrize("arguments", [(), ("single-task", "--seeds", "5"), ("--no-such-option",)])
def test_a_missing_command_names_its_extra(install, arguments):
    install()
    answer = call("paper", *arguments)
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert answer.stderr == "error: `dualform paper` is not installed: pip install 'dualform[paper]'.\n"


def test_help_names_the_extra_of_a_missing_command(install):
    install()
    for answer in (call("--help"), call("paper", "--help")):
        assert answer.exit_code == 0
        assert "Run the paper's experiments. Not installed: pip install 'dualform[paper]'." in answer.stdout


def test_a_command_of_another_package(install):
    def greet(name: str, times: int = 1) -> None:
        """Say hello."""
        if name == "nobody":
            raise QuestionError("whom\nshall I greet?")
        print(f"hello {name} " * times)

    install(greet=lambda: greet)
    assert "Say hello." in call("--help").stdout
    assert call("greet", "Ada", "--times", "2").stdout == "hello Ada hello Ada \n"
    refused = call("greet", "nobody")
    assert (refused.exit_code, refused.stderr) == (2, "error: whom shall I greet?\n")
    assert call("greet").exit_code == 2  # an argument is missing


def test_a_broken_package_does_not_break_other_commands(install):
    def load():
        raise ImportError("no module named 'flux'")

    install(broken=load)
    assert call("info", "--help").exit_code == 0
    assert call("--help").exit_code == 0
    answer = call("broken", "--any", "thing")
    assert answer.exit_code == 2
    assert "elsewhere:broken, which cannot be loaded: ImportError(\"no module named 'flux'\")" in answer.stderr


def test_other_packages_do_not_replace_our_commands(install):
    install(info=lambda: pytest.fail("loaded"))
    assert "what a recording holds" in call("info", "--help").stdout


def test_our_own_commands_do_not_look_for_others(monkeypatch, tmp_path):
    monkeypatch.setattr(plugins, "entry_points", lambda group: pytest.fail("looked"))
    assert call("info", str(tmp_path)).exit_code == 2
