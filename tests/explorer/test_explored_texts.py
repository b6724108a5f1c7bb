"""Prompts and passages beside the library's own answers."""

import polars as pl
import pytest
import runs
import torch
from clients import Client, finished

from dualform.explorer.app import application
from dualform.explorer.session import Session
from dualform.explorer.subject import subject

PROMPT = "the wolf and"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    dual, language = runs.letters(tmp_path_factory.mktemp("letters") / "run")
    return Session(subject(dual, language=language))


@pytest.fixture(scope="module")
def asked(text):
    return Client(application(text))


def tokens(prompt=PROMPT):
    return torch.tensor([[runs.LETTERS.index(letter) for letter in prompt]])


def test_the_run_has_text_and_gates(asked):
    run = asked.get("/api/run")
    assert run["text"]["prompt"] == PROMPT
    assert {layer["name"]: layer["gates"] for layer in run["layers"]} == {
        "embedding": [],
        "lstm": ["i", "f", "g", "o"],
        "decoder": [],
    }
    assert run["tests"] == 0


def test_a_prompt_token_by_token(asked, text):
    found = asked.get("/api/text", prompt=PROMPT, position=4)
    assert [token["text"] for token in found["tokens"]] == list(PROMPT)
    with torch.no_grad():
        expected = text.subject.dual.model()(tokens())[0].softmax(-1)
    assert found["tokens"][0]["probability"] is None
    assert found["tokens"][3]["probability"] == pytest.approx(float(expected[2, tokens()[0, 3]]), rel=1e-5)
    assert found["following"][0]["unit"] == int(expected[4].argmax())
    assert found["following"][0]["prompt"] == PROMPT[:5] + found["following"][0]["text"]


@pytest.mark.parametrize("layer", ["embedding", "lstm", "decoder"])
def test_passages_are_what_the_layer_attends_to(asked, text, layer):
    found = asked.get("/api/passages", prompt=PROMPT, position=4, layer=layer, k=5)
    whole = text.subject.dual.attend(tokens(), rows=1)[layer].top(5, by="place")
    expected = whole.filter(pl.col("position") == 4)
    assert [one["excerpt"]["position"] for one in found["highest"]] == expected["place"].to_list()
    assert [one["weight"] for one in found["highest"]] == pytest.approx(expected["weight"].to_list(), rel=1e-5)
    assert [one["visits"] for one in found["highest"]] == expected["visits"].to_list()
    assert all(one["excerpt"]["token"] == runs.TEXT[one["excerpt"]["position"]] for one in found["highest"])


@pytest.mark.parametrize("options", [{}, {"gate": "f"}, {"part": "recurrent"}])
def test_passages_that_push_a_token(asked, text, options):
    found = asked.get(
        "/api/passages", prompt=PROMPT, position=4, layer="lstm", kind="contribution", target=3, k=4, **options
    )
    answer = text.subject.dual.contributions(tokens(), target=lambda output: output[:, 4, 3], rows=1)["lstm"]
    answer = answer.gate("f") if "gate" in options else answer.part("recurrent") if "part" in options else answer
    expected = answer.top(4, by="place")
    assert [one["weight"] for one in found["highest"]] == pytest.approx(expected["contribution"].to_list(), rel=1e-4)
    assert found["towards"] == runs.LETTERS[3]
    assert found["lowest"][0]["weight"] < 0


@pytest.mark.parametrize("layer", ["embedding", "lstm", "decoder"])
def test_passages_without_which_a_token_would_change(asked, text, layer):
    job = finished(asked, kind="influence", prompt=PROMPT, position=4, layer=layer, target=3)
    assert job["state"] == "done", job
    odds = text.subject.dual.influence(
        tokens(), rows=1, target=lambda output: output[:, 4].softmax(-1)[:, 3].logit()
    )  # log(p / (1 - p))
    for found, lowest in ((job["result"]["highest"], False), (job["result"]["lowest"], True)):
        expected = odds[layer].top(8, by="place", lowest=lowest)
        assert [one["excerpt"]["position"] for one in found] == expected["place"].to_list()
        assert [one["weight"] for one in found] == pytest.approx(expected["influence"].to_list(), rel=1e-3)
    assert job["result"]["towards"] == runs.LETTERS[3]
    assert "An estimate" in job["result"]["sentence"]


def test_influence_on_a_text_asks_for_what_is_there(asked):
    assert "vocabulary" in finished(asked, kind="influence", prompt=PROMPT, layer="lstm", target=999)["problem"]
    assert "no layer" in finished(asked, kind="influence", prompt=PROMPT, layer="lst")["problem"]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", "empty"), ("THE 7", "unknown letters"), ("a" * 401, "at most 400"), ("x\u202e", "unknown")],
)
def test_prompts_that_cannot_be_read(asked, prompt, words):
    status, problem = asked.refused("/api/text", prompt=prompt)
    assert status == 400
    assert words in problem


def test_places_that_are_not_there(asked):
    assert "there is no token 99" in asked.refused("/api/text", prompt=PROMPT, position=99)[1]
    assert (
        "vocabulary" in asked.refused("/api/passages", prompt=PROMPT, layer="lstm", kind="contribution", target=999)[1]
    )
    assert "part" in asked.refused("/api/passages", prompt=PROMPT, layer="decoder", part="input")[1]


def test_a_run_without_text_says_so(client):
    assert "no text" in client.refused("/api/text", prompt="the")[1]


def test_totals_per_position_are_enough(tmp_path):
    dual, language = runs.letters(tmp_path / "run", keep="totals", totals=["place"])
    full, _ = runs.letters(tmp_path / "full")
    client = Client(application(Session(subject(dual, language=language))))
    found = client.get("/api/passages", prompt=PROMPT, layer="lstm", k=3)
    expected = full.attend(tokens(), rows=1)["lstm"].top(3, by="place").filter(pl.col("position") == len(PROMPT) - 1)
    assert [one["excerpt"]["position"] for one in found["highest"]] == expected["place"].to_list()
