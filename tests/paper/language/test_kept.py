"""Prompts put to totals without PyTorch, beside what the library answers with it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from story import SETTINGS
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.errors import MaskError, QuestionError, StoreDamagedError
from dualform.paper.language import asked, beside, kept, plain
from dualform.paper.language.asking import Recorded
from dualform.paper.language.model import build_model
from dualform.paper.language.recording import train
from dualform.paper.language.shape import Shape

PROMPT = "The wolf stood"


def told(answer):
    """An answer, with its numbers apart."""
    plainly = answer.to_dict()
    numbers = [share for _, share in plainly["following"]] + [one.pop("score") for one in plainly["found"]]
    return plainly | {"following": [token for token, _ in plainly["following"]]}, numbers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"part": "input", "top": 3},
        {"part": "recurrent", "width": 7},
        {"mean": True},
        {"where": "token = 'e' and text_position < 60", "top": 400},
        {"where": "text_position < 0"},
        {"top": 10_000},
    ],
)
@pytest.mark.parametrize("prompt", [PROMPT, "T", "The crow\nlet"])
def test_answers_are_those_of_the_library(runs, prompt, options):
    expected, numbers = told(Recorded(runs / "totals").ask(prompt, **options))
    found, ours = told(kept.find(runs / "totals", options.get("where")).ask(prompt, **options))
    assert found == expected
    np.testing.assert_allclose(ours, numbers, rtol=1e-4, atol=1e-5 * max(map(abs, numbers)))


def test_all_scores_are_those_of_the_library(runs):
    ours, recorded = kept.find(runs / "totals"), Recorded(runs / "totals")
    tokens = recorded.text.encode(PROMPT)
    query = recorded.dual.attend(tokens[None])["lstm"].queries[0, -1].detach()
    for part in asked.PARTS:
        expected, found = recorded.scores(tokens, part=part), ours.scores(query.numpy(), part)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-5 * abs(expected.scores).max())
        np.testing.assert_array_equal(found.visits, expected.visits)


@pytest.mark.parametrize("between", [0, 5])
@pytest.mark.parametrize("tokens", [[3], [0, 8, 3, 3, 1, 0, 7]])
def test_the_model_in_numpy_is_the_model(between, tokens):
    shape = Shape(9, 4, 6, dropout=0.5, between=between)
    model = build_model(shape, 1).double().eval()
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    assert {name: value.shape for name, value in weights.items()} == plain.sizes(shape)
    found = plain.read(shape, weights, tokens)
    read = torch.tensor(tokens)[None]
    inputs = model.between(model.embedding(read))[0, -1]
    before = model.hidden(read[:, :-1])[1][0][0, 0] if len(tokens) > 1 else torch.zeros(6).double()
    np.testing.assert_allclose(found.query, torch.cat([inputs, before]).detach(), rtol=1e-12)
    logits = model(read)[0][0, -1].detach()
    np.testing.assert_allclose(found.logits, logits, rtol=1e-12)
    np.testing.assert_allclose(plain.softmax(found.logits), torch.softmax(logits, 0), rtol=1e-12)


def test_large_numbers_do_not_overflow():
    shape = Shape(2, 1, 1)
    weights = {name: np.full(size, 1e4, np.float32) for name, size in plain.sizes(shape).items()}
    with np.errstate(all="raise", under="ignore"):
        assert plain.softmax(plain.read(shape, weights, [0, 1]).logits).tolist() == [0.5, 0.5]


@given(arrays(np.float64, st.integers(0, 30), elements=st.integers(-3, 3).map(float)), st.integers(1, 40))
def test_the_highest_are_those_of_a_full_sort(scores, count):
    assert asked.highest(scores, count).tolist() == sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:count]


def test_a_linear_map_before_the_lstm(tmp_path, story):
    train(story, replace(SETTINGS, between=5, steps=4), tmp_path / "run")
    expected, numbers = told(Recorded(tmp_path / "run").ask(PROMPT, part="input"))
    found, ours = told(kept.find(tmp_path / "run").ask(PROMPT, part="input"))
    assert found == expected
    assert ours == pytest.approx(numbers, rel=1e-4)


def test_what_needs_the_library(runs, tmp_path):
    assert kept.find(runs / "totals", "token = 'e'") is not None
    assert kept.find(runs / "totals", "step < 3") is None
    assert kept.find(runs / "totals", "token =") is None
    assert kept.find(runs / "slots") is None
    assert kept.find(tmp_path) is None
    other = tmp_path / "other"
    shutil.copytree(runs / "totals", other)
    about = beside.read(other)
    beside.write(other, replace(about, shape=replace(about.shape, state=7)))
    assert kept.find(other) is None
    beside.write(other, replace(about, layer="decoder"))
    assert kept.find(other) is None


def test_totals_built_from_slots(runs, tmp_path):
    shutil.copytree(runs / "slots", tmp_path / "run")
    dualform.build_totals(tmp_path / "run", "text_position", kind="keys")
    expected = Recorded(runs / "slots").ask(PROMPT).found
    found = kept.find(tmp_path / "run").ask(PROMPT).found
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"prompt": ""}, QuestionError, "the prompt is empty"),
        ({"prompt": "Don't"}, QuestionError, "not among the .* characters of story's vocabulary"),
        ({"top": 0}, QuestionError, "top 0: expected at least 1"),
        ({"part": "gates"}, QuestionError, "part 'gates': expected one of 'both', 'input', 'recurrent'"),
        ({"where": "token"}, MaskError, "expected true or false"),
    ],
)
def test_questions_that_cannot_be_answered(runs, options, error, said):
    with pytest.raises(error, match=said):
        kept.find(runs / "totals").ask(**{"prompt": PROMPT, **options})


READ = [
    ("totals-*/totals.safetensors", ["0.0.keys", "0.0.visits"]),
    ("snapshot-*18.safetensors", [f"model.{name}" for name in plain.sizes(Shape(2, 1, 1))]),
]


@pytest.mark.parametrize(("pattern", "name"), [(pattern, name) for pattern, names in READ for name in names])
def test_damage_is_found_in_every_tensor_that_is_read(runs, tmp_path, pattern, name):
    shutil.copytree(runs / "totals", tmp_path / "run")
    (path,) = (tmp_path / "run").glob(pattern)
    content = bytearray(path.read_bytes())
    size = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:size])[name]["data_offsets"]
    content[size + (begin + end) // 2] ^= 4
    path.write_bytes(content)
    assert kept.find(tmp_path / "run") is not None
    shown = CliRunner().invoke(app, ["passages", str(tmp_path / "run"), "--prompt", PROMPT])
    assert shown.exit_code == 2
    assert f"is damaged: the checksum of {name!r} does not fit" in shown.stderr


def test_damage_is_found_in_the_groups_and_sizes(runs, tmp_path):
    shutil.copytree(runs / "totals", tmp_path / "run")
    (path,) = (tmp_path / "run").glob("totals-*/*.parquet")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(StoreDamagedError, match="its checksum does not fit the manifest"):
        kept.find(tmp_path / "run").ask(PROMPT)
    path.write_bytes(content[:-1])
    shown = CliRunner().invoke(app, ["passages", str(tmp_path / "run"), "--prompt", PROMPT])
    assert (shown.exit_code, "is damaged: it has" in shown.stderr) == (2, True)


def test_the_command_does_without_pytorch(runs):
    code = (
        "import sys\nfrom dualform.cli import app\ntry: app()\nfinally: print({'torch', 'matplotlib', 'scipy'} & set(sys.modules), "
        "file=sys.stderr)"
    )
    arguments = ["passages", str(runs / "totals"), "--prompt", PROMPT, "--json"]
    found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "set()"
    assert json.loads(found.stdout)["found"][0]["passage"]["position"] == (
        Recorded(runs / "totals").ask(PROMPT).found[0].passage.position
    )
