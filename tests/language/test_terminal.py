"""Passages as a terminal shows them."""

import io
import json

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from dualform.cli import app
from dualform.language.recorded import RecordedLanguageModel
from dualform.language.terminal import BRACKETS, marked, show_answer, visible
from dualform.language.text import Passage

PROMPT = "the Crow — 🧀"


def shown(asked, **options):
    console = Console(file=io.StringIO(), width=100, **options)
    show_answer(console, asked)
    return console.file.getvalue()


def call(*arguments):
    return CliRunner().invoke(app, ["passages", *map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_unicode_is_shown_and_nothing_is_wider_than_the_terminal(runs):
    printed = shown(RecordedLanguageModel(runs / "totals").ask(PROMPT, top=20))
    assert "prompt: the Crow — ⟦🧀⟧" in printed
    assert "naïve" in printed
    assert "⏎" in printed
    assert max(cell_len(line) for line in printed.splitlines()) <= 100


def test_the_token_is_marked(runs):
    asked = RecordedLanguageModel(runs / "totals").ask("The fox saw ", top=3)
    token = asked.passages[0].passage.token
    assert f"⟦{visible(token)}⟧" in shown(asked)
    on_screen = shown(asked, force_terminal=True)
    assert "⟦" not in on_screen
    assert f"\x1b[1;7m{visible(token)}\x1b[0m" in on_screen


def test_what_cannot_be_seen():
    assert [visible(token) for token in (" ", "\n", "<eos>", "é", "\x1b")] == ["␣", "⏎", "⏎", "é", "�"]
    passage = Passage(0, "[red]", "a\x1b[31m\n", "[b]", "\r\n")
    assert marked(passage, BRACKETS).plain == "a�[31m⏎⟦[b]⟧�⏎"


def test_the_command(runs):
    found = call(runs / "totals", "--prompt", PROMPT, "--top", 2)
    assert found.exit_code == 0, found.output
    assert "Highest of" in found.stdout
    assert "attention weight, sum over visits" in found.stdout
    found = call(runs / "totals", "--prompt", "cheese.\\nA", "--top", 2, "--json", "--part", "recurrent", "--width", 3)
    content = json.loads(found.stdout)
    assert content["prompt"] == "cheese.\nA"
    assert len(content["passages"]) == 2
    assert len(content["passages"][0]["passage"]["after"]) <= 3
    found = call(runs / "slots", "--prompt", PROMPT, "--gate", "f", "--slots", "--where", "step < 3")
    assert found.exit_code == 0, found.output
    assert "through gate f" in found.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", ""], "error: the prompt is empty"),
        (["--prompt", "Ω"], "error: not among the"),
        (["--prompt", "a", "--absolute"], "error: totals by text_position of sizes"),
        (["--prompt", "a", "--gate", "f"], "error: contributions need error signals"),
    ],
)
def test_errors_are_one_line(runs, options, said):
    found = call(runs / "totals", *options)
    assert found.exit_code == 2
    assert found.stderr.startswith(said)
    assert found.stderr.count("\n") == 1


def test_a_recording_without_a_text(tmp_path):
    found = call(tmp_path, "--prompt", "a")
    assert found.exit_code == 2
    assert "has no text.json" in found.stderr
