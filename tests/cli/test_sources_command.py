"""`dualform sources`, and the ways to name a model and a tokenizer."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import documents
from dualform.cli import app

pytest.importorskip("transformers")
PROMPT, ANSWER = next(iter(documents.FACTS.items()))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return documents.train(tmp_path_factory.mktemp("gpt2") / "run", epochs=10)


@pytest.fixture(scope="module")
def checkpoint(gpt2, tmp_path_factory):
    """A folder as Trainer writes it; the weights are not needed."""
    folder = tmp_path_factory.mktemp("checkpoint")
    gpt2.model.config.architectures = ["GPT2LMHeadModel"]
    gpt2.model.config.save_pretrained(folder)
    gpt2.tokenizer.save_pretrained(folder)
    return folder


def call(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "140"})


def test_it_is_what_the_library_says(gpt2, checkpoint):
    asked = "--prompt", PROMPT, "--completion", ANSWER, "--top", 2, "--segments", 2, "--json"
    found = call("sources", gpt2.path, "--model", checkpoint, *asked)
    assert found.exit_code == 0, found.output
    expected = gpt2.dual.sources(PROMPT, ANSWER, tokenizer=gpt2.tokenizer, k=2, segments=2)
    answer = json.loads(found.stdout)
    assert [line["sample_id"] for line in answer["sources"]] == expected.frame["sample_id"].to_list()
    assert answer["sources"][0]["text"] == documents.DOCUMENTS[0]
    assert [one["token"] for one in answer["completion"]] == expected.completion
    assert len(answer["tokens"]) == 2 * len(expected.completion)


def test_it_prints_tables(gpt2, checkpoint):
    asked = "--prompt", PROMPT, "--segments", 1, "--layer", "*.mlp.*", "--method", "influence"
    found = call("sources", gpt2.path, "--model", checkpoint, "--tokenizer", checkpoint, *asked)
    assert found.exit_code == 0, found.output
    assert "by influence, estimated" in found.stdout
    assert "Token by token" in found.stdout


def test_models_and_tokenizers_of_a_module(gpt2, tmp_path, monkeypatch):
    tests = Path(__file__).parent.parent
    (tmp_path / "my_texts.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tests)!r})\nimport documents\n"
        "tokenizer = documents.make_tokenizer()\n"
        "def model():\n    return documents.make_model('gpt2', len(tokenizer))\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = "--model", "my_texts:model", "--tokenizer", "my_texts:tokenizer", "--prompt", PROMPT, "--segments", 1
    try:
        found = call("sources", gpt2.path, *asked, "--method", "influence", "--top", 1, "--json")
    finally:
        sys.modules.pop("my_texts", None)
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.stdout)["sources"]) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "documents:make_tokenizer"], "expected an nn.Module"),
        (["--model", "no_such:model"], "cannot be found"),
    ],
)
def test_names_that_are_wrong(gpt2, options, words):
    found = call("sources", gpt2.path, *options, "--prompt", PROMPT)
    assert found.exit_code == 2
    assert words in found.stderr


def test_a_tokenizer_must_be_named(gpt2, checkpoint, tmp_path):
    found = call("sources", gpt2.path, "--model", checkpoint, "--tokenizer", tmp_path, "--prompt", PROMPT)
    assert found.exit_code == 2
    assert "has no tokenizer of Hugging Face" in found.stderr


def test_a_folder_that_is_no_model(gpt2, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    found = call("sources", gpt2.path, "--model", tmp_path, "--prompt", PROMPT)
    assert found.exit_code == 2
    assert "names no model of Hugging Face" in found.stderr
