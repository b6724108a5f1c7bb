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
from tiny_language_model import train_language_model
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.errors import MaskError, QuestionError, StoreDamagedError
from dualform.language import answers, numpy_model
from dualform.language.description import read_description, write_description
from dualform.language.from_totals import find_totals
from dualform.language.model import build_model
from dualform.language.recorded import RecordedLanguageModel
from dualform.language.shape import Shape

PROMPT = "The wolf stood"


def split_numbers(answer):
    """An answer, with its numbers apart."""
    plainly = answer.to_dict()
    numbers = [share for _, share in plainly["following"]] + [one.pop("score") for one in plainly["passages"]]
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
    expected, numbers = split_numbers(RecordedLanguageModel(runs / "totals").ask(prompt, **options))
    found, ours = split_numbers(find_totals(runs / "totals", options.get("where")).ask(prompt, **options))
    assert found == expected
    np.testing.assert_allclose(ours, numbers, rtol=1e-4, atol=1e-5 * max(map(abs, numbers)))


def test_all_scores_are_those_of_the_library(runs):
    ours, recorded = find_totals(runs / "totals"), RecordedLanguageModel(runs / "totals")
    tokens = recorded.text.encode(PROMPT)
    query = recorded.dual.attend(tokens[None])["lstm"].queries[0, -1].detach()
    for part in answers.PARTS:
        expected, found = recorded.scores(tokens, part=part), ours.scores(query.numpy(), part)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-5 * abs(expected.scores).max())
        np.testing.assert_array_equal(found.visits, expected.visits)


@pytest.mark.parametrize("between", [0, 5])
@pytest.mark.parametrize("tokens", [[3], [0, 8, 3, 3, 1, 0, 7]])
def test_the_model_in_numpy_is_the_model(between, tokens):
    shape = Shape(9, 4, 6, dropout=0.5, between=between)
    model = build_model(shape, 1).double().eval()
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    assert {name: value.shape for name, value in weights.items()} == numpy_model.sizes(shape)
    found = numpy_model.read(shape, weights, tokens)
    read = torch.tensor(tokens)[None]
    inputs = model.between(model.embedding(read))[0, -1]
    before = model.hidden(read[:, :-1])[1][0][0, 0] if len(tokens) > 1 else torch.zeros(6).double()
    np.testing.assert_allclose(found.query, torch.cat([inputs, before]).detach(), rtol=1e-12)
    logits = model(read)[0][0, -1].detach()
    np.testing.assert_allclose(found.logits, logits, rtol=1e-12)
    np.testing.assert_allclose(numpy_model.softmax(found.logits), torch.softmax(logits, 0), rtol=1e-12)


def test_large_numbers_do_not_overflow():
    shape = Shape(2, 1, 1)
    weights = {name: np.full(size, 1e4, np.float32) for name, size in numpy_model.sizes(shape).items()}
    with np.errstate(all="raise", under="ignore"):
        assert numpy_model.softmax(numpy_model.read(shape, weights, [0, 1]).logits).tolist() == [0.5, 0.5]


@given(arrays(np.float64, st.integers(0, 30), elements=st.integers(-3, 3).map(float)), st.integers(1, 40))
def test_the_highest_are_those_of_a_full_sort(scores, count):
    assert answers.highest(scores, count).tolist() == sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:count]


def test_a_linear_map_before_the_lstm(tmp_path, story):
    train_language_model(story, tmp_path / "run", between=5, steps=4)
    recorded = RecordedLanguageModel(tmp_path / "run")
    tokens = recorded.text.encode(PROMPT)
    query = recorded.dual.attend(tokens[None])["lstm"].queries[0, -1].detach()
    expected = recorded.scores(tokens, part="input").scores
    scores = find_totals(tmp_path / "run").scores(query.numpy(), "input").scores
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


def test_what_needs_the_library(runs, tmp_path):
    assert find_totals(runs / "totals", "token = 'e'") is not None
    assert find_totals(runs / "totals", "step < 3") is None
    assert find_totals(runs / "totals", "token =") is None
    assert find_totals(runs / "slots") is None
    assert find_totals(tmp_path) is None
    other = tmp_path / "other"
    shutil.copytree(runs / "totals", other)
    about = read_description(other)
    write_description(other, replace(about, shape=replace(about.shape, state=7)))
    assert find_totals(other) is None
    write_description(other, replace(about, layer="decoder"))
    assert find_totals(other) is None


def test_totals_built_from_slots(runs, tmp_path):
    shutil.copytree(runs / "slots", tmp_path / "run")
    dualform.build_totals(tmp_path / "run", "text_position", kind="keys")
    expected = RecordedLanguageModel(runs / "slots").ask(PROMPT).passages
    found = find_totals(tmp_path / "run").ask(PROMPT).passages
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
        find_totals(runs / "totals").ask(**{"prompt": PROMPT, **options})


READ = [
    ("totals-*/totals.safetensors", ["0.0.keys", "0.0.visits"]),
    ("snapshot-*18.safetensors", [f"model.{name}" for name in numpy_model.sizes(Shape(2, 1, 1))]),
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
    assert find_totals(tmp_path / "run") is not None
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
        find_totals(tmp_path / "run").ask(PROMPT)
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
    assert json.loads(found.stdout)["passages"][0]["passage"]["position"] == (
        RecordedLanguageModel(runs / "totals").ask(PROMPT).passages[0].passage.position
    )
