"""`dualform estimate`: what the library says, as a table or as JSON."""

import json

import pytest
import torch
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.store.format import size_text

MODELS = """
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 8)

    def forward(self, tokens):
        return self.head(self.table(tokens))

images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10))
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "estimated_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import estimated_models

    return estimated_models


def call(*arguments):
    return CliRunner().invoke(app, ["estimate", *map(str, arguments)], env={"COLUMNS": "140", "NO_COLOR": "1"})


def test_it_is_what_the_library_says(models):
    asked = "--model", "estimated_models:Tokens", "--tokens", 30, "--rows", 1000, "--batch", 10, "--dtype", "float16"
    found = call(*asked, "--json")
    assert found.exit_code == 0, found.output
    expected = dualform.estimate(models.Tokens(), rows=1000, positions=30, batch=10, dtype="float16")
    assert json.loads(found.stdout) == json.loads(json.dumps(expected.to_dict()))
    assert json.loads(call(*asked, "--shapes-only", "--json").stdout) == json.loads(found.stdout)


def test_it_prints_what_each_keep_takes(models):
    asked = "--model", "estimated_models:images", "--shape", "3,8,8", "--rows", 500, "--layers", "0", "--samples", 50
    found = call(*asked)
    assert found.exit_code == 0, found.output
    expected = dualform.estimate(models.images, torch.zeros(1, 3, 8, 8), rows=500, layers=["0"], samples=50)
    for keep in ("slots", "rows", "keys"):
        [line] = [line for line in found.stdout.splitlines() if line.split()[:1] == [keep]]
        assert size_text(expected.bytes_per_row(keep)) in line
        assert size_text(expected.nbytes(keep)) in line
    assert "for each group" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --tokens and --shape"),
        (("--tokens", 3, "--shape", "3"), "give one of --tokens and --shape"),
        (("--shape", "3x8"), "expected whole numbers, such as 3,32,32"),
        (("--tokens", 3), "the model did not run on the example"),
        (("--shape", "3,8,8", "--layers", "head"), "names no layer"),
    ],
)
def test_what_is_wrong_is_one_line(models, arguments, message):
    found = call("--model", "estimated_models:images", "--rows", 10, *arguments)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())
