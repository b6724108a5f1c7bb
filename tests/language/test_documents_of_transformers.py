"""Passages of recorded Transformers: the tokens come from the recording, the words from the tokenizer."""

import polars as pl
import pytest
import torch
from typer.testing import CliRunner

import documents
import dualform
from dualform.cli import app
from dualform.errors import NotRecordedError, QuestionError

pytest.importorskip("transformers")
from dualform.language.documents import RecordedDocuments

PROMPT = next(iter(documents.FACTS))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return documents.train(tmp_path_factory.mktemp("gpt2") / "run", epochs=6)


@pytest.fixture(scope="module")
def recorded(gpt2):
    return RecordedDocuments(gpt2.dual, gpt2.tokenizer)


def test_the_tokens_are_those_of_the_documents(gpt2, recorded):
    for number, text in enumerate(documents.DOCUMENTS):
        tokens = gpt2.tokenizer(text)["input_ids"]
        for position in (0, len(tokens) // 2, len(tokens) - 1):
            passage = recorded.passage(number, position, width=1000)
            assert passage.token == gpt2.tokenizer.decode([tokens[position]])
            assert passage.before + passage.token + passage.after == text


def test_an_answer_is_what_the_layer_attends_to(gpt2, recorded):
    layer = "transformer.h.1.mlp.c_fc"
    answer = recorded.ask(PROMPT, top=3, layer=layer)
    tokens = recorded.encode(PROMPT)
    whole = gpt2.dual.attend(tokens[None])[layer].top(3, by=["sample_id", "position"])
    expected = whole.filter(pl.col("position") == len(tokens) - 1)
    assert [one.passage.title for one in answer.passages] == [f"sample_id {n}" for n in expected["sample_id"]]
    assert [one.passage.position for one in answer.passages] == expected["slot_position"].to_list()
    assert [one.score for one in answer.passages] == pytest.approx(expected["weight"].to_list(), rel=1e-5)


def test_the_query_of_an_embedding_is_its_token(gpt2, recorded):
    answer = recorded.ask(PROMPT, top=2, layer="transformer.wte")
    assert {one.passage.token for one in answer.passages} == {answer.query}


def test_the_likeliest_next_tokens(gpt2, recorded):
    with torch.no_grad():
        expected = gpt2.model(recorded.encode(PROMPT)[None]).logits[0, -1].softmax(0)
    answer = recorded.ask(PROMPT, top=1)
    assert answer.following[0] == (
        gpt2.tokenizer.decode([int(expected.argmax())]),
        pytest.approx(float(expected.max()), abs=1e-4),
    )


@pytest.mark.parametrize("layer", [None, "lm_head"])
def test_contributions_to_a_next_token(gpt2, recorded, layer):
    token = gpt2.tokenizer.decode([gpt2.tokenizer(" the")["input_ids"][0]])
    answer = recorded.ask(PROMPT, top=2, target=token, layer=layer)
    found = gpt2.dual.contributions(recorded.encode(PROMPT)[None], target=token, tokenizer=gpt2.tokenizer)
    expected = (found if layer is None else found[layer]).top(2, by=["sample_id", "position"])
    assert [one.score for one in answer.passages] == pytest.approx(expected["contribution"].to_list(), rel=1e-4)
    assert answer.score.startswith(f"contribution to the logit of {token!r}")


def test_conditions(recorded):
    answer = recorded.ask(PROMPT, top=5, where="sample_id = 3 and step < 4")
    assert {one.passage.title for one in answer.passages} == {"sample_id 3"}


def test_a_run_without_the_tokens(gpt2, tmp_path):
    run = documents.train(tmp_path / "run", epochs=1, layers="*.mlp.*")
    with pytest.raises(NotRecordedError, match="does not have the tokens of its documents"):
        RecordedDocuments(run.dual, run.tokenizer)


def test_documents_whose_tokens_move_are_refused(gpt2, tmp_path):
    """Padding on the left: a position is another token in each batch."""
    tokenizer = documents.make_tokenizer()
    tokenizer.padding_side = "left"
    model = documents.make_model("gpt2", len(tokenizer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for ids in ([0, 1], [0, 4]):
            recorder.batch(sample_id=ids)
            model(**documents.encoded(tokenizer, [documents.DOCUMENTS[number] for number in ids])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(NotRecordedError, match="at other positions in other visits"):
        RecordedDocuments(dualform.open(tmp_path / "run", model), tokenizer)


def test_prompts_and_names_that_make_no_sense(gpt2, recorded):
    with pytest.raises(QuestionError, match="the prompt is empty"):
        recorded.ask("")
    with pytest.raises(QuestionError, match="top 0"):
        recorded.ask(PROMPT, top=0)
    with pytest.raises(QuestionError, match="no token at position 999"):
        recorded.passage(0, 999)
    with pytest.raises(QuestionError, match="there is no such column"):
        RecordedDocuments(gpt2.dual, gpt2.tokenizer, by="book")


def test_the_command(gpt2, recorded, tmp_path):
    gpt2.model.config.architectures = ["GPT2LMHeadModel"]
    gpt2.model.config.save_pretrained(tmp_path)
    gpt2.tokenizer.save_pretrained(tmp_path)
    asked = ["passages", str(gpt2.path), "--model", str(tmp_path), "--prompt", PROMPT, "--top", "2"]
    found = CliRunner().invoke(app, asked, env={"COLUMNS": "140"})
    assert found.exit_code == 0, found.output
    first = recorded.ask(PROMPT, top=1).passages[0]
    assert first.passage.title in found.stdout
    assert "attention weight in lm_head" in found.stdout
    wrong = CliRunner().invoke(app, [*asked, "--gate", "f"])
    assert wrong.exit_code == 2
    assert "LSTMs" in wrong.output
