"""The text view and reports of a recorded Transformer with its tokenizer."""

import json
import re

import polars as pl
import pytest
from browsing import browser, expect, needs_browser, page, settled
from clients import Client, finished
from typer.testing import CliRunner

import documents
from dualform.cli import app
from dualform.explorer.app import application
from dualform.explorer.report import write
from dualform.explorer.session import Session
from dualform.explorer.subject import subject

pytest.importorskip("transformers")
from dualform.explorer import explore

PROMPT, OTHER = list(documents.FACTS)[:2]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return documents.train(tmp_path_factory.mktemp("gpt2") / "run", epochs=3)


@pytest.fixture(scope="module")
def session(gpt2):
    return Session(subject(gpt2.dual, tokenizer=gpt2.tokenizer))


@pytest.fixture(scope="module")
def asked(session):
    return Client(application(session))


def test_a_prompt_token_by_token(asked, gpt2):
    found = asked.get("/api/text", prompt=PROMPT)
    assert "".join(token["text"] for token in found["tokens"]) == PROMPT
    assert found["following"][0]["probability"] > 0


def test_the_page_begins_with_a_document(asked):
    assert documents.DOCUMENTS[0].startswith(asked.get("/api/run")["text"]["prompt"])


@pytest.mark.parametrize("kind", ["attention", "contribution"])
def test_passages_name_document_and_position(asked, gpt2, kind):
    layer = "transformer.h.0.mlp.c_fc"
    found = asked.get("/api/passages", prompt=PROMPT, layer=layer, kind=kind, k=3)
    tokens = gpt2.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    by = ["sample_id", "position"]
    if kind == "attention":
        expected = gpt2.dual.attend(tokens)[layer].top(3, by=by).filter(pl.col("position") == tokens.shape[1] - 1)
    else:
        expected = gpt2.dual.contributions(tokens, target="next token")[layer].top(3, by=by)
    for one, line in zip(found["highest"], expected.to_dicts(), strict=True):
        assert one["excerpt"]["title"] == f"sample_id {line['sample_id']}"
        assert one["excerpt"]["position"] == line["slot_position"]
        assert one["weight"] == pytest.approx(line["weight" if kind == "attention" else "contribution"], rel=1e-4)


def test_influence_on_a_next_token(asked):
    job = finished(asked, kind="influence", prompt=PROMPT, layer="lm_head")
    assert job["state"] == "done", job
    assert job["result"]["highest"][0]["excerpt"]["title"].startswith("sample_id")


def test_a_report_about_prompts(session, tmp_path):
    written = write(session, tmp_path / "report.html", prompts=[PROMPT, OTHER])
    assert written.examples == 2
    content = (tmp_path / "report.html").read_text(encoding="utf-8")
    kept = re.search(r'id="answers">(.*?)</script>', content, re.DOTALL)
    answers = json.loads(kept.group(1))
    assert answers["/api/run"]["text"]["prompts"] == [PROMPT, OTHER]
    assert f"/api/passages?kind=attention&layer=lm_head&prompt={OTHER}" in answers


@needs_browser
def test_a_report_opens_in_a_browser(session, tmp_path):
    write(session, tmp_path / "report.html", prompts=[PROMPT, OTHER])
    with browser() as opened, page(opened, f"file://{tmp_path / 'report.html'}#/text") as look:
        settled(look)
        expect(look.get_by_text("At “ is” it looks most at")).to_be_visible()
        look.get_by_role("radio", name=OTHER).click()
        expect(look.get_by_text("At “ was” it looks most at")).to_be_visible()
        look.get_by_role("radio", name="Contribution").click()
        expect(look.get_by_text("up most")).to_be_visible()
        look.get_by_label("Layer").select_option("transformer.wte")
        expect(look.get_by_text("up most")).to_be_visible()


@needs_browser
def test_the_page_of_a_transformer(gpt2):
    server = explore(gpt2.dual, tokenizer=gpt2.tokenizer, browser=False, block=False)
    try:
        with browser() as opened, page(opened, f"{server.url}#/text") as look:
            settled(look)
            look.get_by_label("Prompt", exact=True).last.fill(PROMPT)
            look.get_by_role("button", name="Ask").click()
            expect(look.get_by_text("At “ is” it looks most at")).to_be_visible()
            expect(look.locator(".passages li").first).to_contain_text("sample_id")
    finally:
        server.close()


def test_the_report_command(gpt2, tmp_path):
    gpt2.model.config.architectures = ["GPT2LMHeadModel"]
    gpt2.model.config.save_pretrained(tmp_path)
    gpt2.tokenizer.save_pretrained(tmp_path)
    out = tmp_path / "report.html"
    asked = ["report", str(gpt2.path), "--model", str(tmp_path), "--prompt", PROMPT, "--out", str(out)]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, found.output
    assert "1 prompts" in found.stdout
    assert out.stat().st_size > 100_000


def test_a_classifier_whose_inputs_are_named(tmp_path):
    """A BatchEncoding as test examples: predictions, sources and influence, shown as text."""
    import torch
    import transformers

    import dualform

    tokenizer = documents.make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, num_labels=3, **sizes)
    ).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = tokenizer(documents.FILLER, return_tensors="pt", padding=True)
    labels = torch.arange(6) % 3
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=torch.arange(6), label=labels)
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    found = Client(application(Session(subject(dual, documents.FILLER, (inputs, labels), tokenizer=tokenizer))))
    prediction = found.get("/api/prediction", input="test:2")
    assert prediction["shown"]["text"] == documents.FILLER[2]
    with torch.no_grad():
        expected = dual.model()(**{name: tensor[2:3] for name, tensor in inputs.items()}).logits[0]
    assert prediction["answer"] == int(expected.argmax())
    sources = found.get("/api/sources", input="test:2", layer="classifier", kind="contribution")
    assert sources["highest"][0]["shown"]["text"] in documents.FILLER
    assert found.get("/api/sources", input="test:1", layer="classifier", kind="attention")["highest"]
    assert finished(found, kind="influence", input="test:2")["state"] == "done"
