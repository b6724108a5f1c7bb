"""Prompts put to a recorded language model, beside plain sums over slots."""

import numpy as np
import polars as pl
import pytest
import torch

import dualform
from dualform.errors import MaskError, NotRecordedError, QuestionError
from dualform.language.recorded import RecordedLanguageModel

PROMPT = "The wolf stood"


@pytest.fixture(scope="module")
def kept(runs):
    return RecordedLanguageModel(runs / "totals")


@pytest.fixture(scope="module")
def whole(runs):
    return RecordedLanguageModel(runs / "slots")


def plainly(runs, absolute=False, columns=slice(None)):
    """Per position, Σ over its slots of key · query, and their number: keys and rows as the store gives them."""
    recorded = RecordedLanguageModel(runs / "slots")
    tokens = recorded.text.encode(PROMPT)
    query = recorded.dual.attend(tokens[None])["lstm"].queries[0, -1].double()
    dual = dualform.open(runs / "slots")
    keys = torch.as_tensor(dual.layer("lstm").keys).double()
    places = torch.tensor(dual.rows["text_position"].explode().to_list())
    scores = keys.reshape(len(places), -1)[:, columns] @ query[columns]
    scores = scores.abs() if absolute else scores
    total = torch.zeros(len(recorded.text.train), dtype=torch.float64).index_add_(0, places, scores)
    return total.numpy(), np.bincount(places, minlength=len(total))


@pytest.mark.parametrize(
    ("part", "columns"), [("both", slice(None)), ("input", slice(6)), ("recurrent", slice(6, None))]
)
def test_scores_are_sums_over_slots(runs, kept, whole, part, columns):
    expected, visits = plainly(runs, columns=columns)
    tokens = kept.text.encode(PROMPT)
    for recorded, tolerance in ((kept, 2e-3), (whole, 1e-4)):  # the slots are in float16
        found = recorded.scores(tokens, part=part)
        np.testing.assert_allclose(found.scores, expected, rtol=tolerance, atol=tolerance * abs(expected).max())
        np.testing.assert_array_equal(found.visits, visits)


def test_sums_of_sizes(runs, whole, kept):
    expected, _ = plainly(runs, absolute=True)
    tokens = whole.text.encode(PROMPT)
    np.testing.assert_allclose(whole.scores(tokens, absolute=True).scores, expected, rtol=1e-4)
    with pytest.raises(NotRecordedError, match=r"totals by text_position of sizes \(absolute\): .* keeps totals only"):
        kept.scores(tokens, absolute=True)


def test_the_best_passages(kept):
    scores = kept.scores(kept.text.encode(PROMPT))
    found = kept.ask(PROMPT, top=5, width=7)
    order = np.argsort(-scores.scores, kind="stable")[:5]
    assert [one.passage.position for one in found.passages] == order.tolist()
    assert [one.score for one in found.passages] == pytest.approx(scores.scores[order])
    assert [one.visits for one in found.passages] == scores.visits[order].tolist()
    assert found.query == "d"
    assert found.positions == np.count_nonzero(scores.visits)
    text = "".join(kept.text.vocabulary[n] for n in kept.text.train.ids)
    for one in found.passages:
        place = one.passage.position
        assert one.passage.token == text[place]
        assert one.passage.before + one.passage.token + one.passage.after == text[max(0, place - 7) : place + 8]
    model = kept.dual.model()
    shares = torch.softmax(model(kept.text.encode(PROMPT)[None])[0][0, -1].detach(), 0)
    token, share = found.following[0]
    assert kept.text.vocabulary[int(shares.argmax())] == token
    assert share == pytest.approx(float(shares.max()))


def test_means(kept):
    scores = kept.scores(kept.text.encode(PROMPT))
    assert len(set(scores.visits.tolist())) > 1
    found = kept.ask(PROMPT, top=3, mean=True)
    assert found.score == "attention weight, mean over visits"
    means = scores.scores / np.maximum(scores.visits, 1)
    assert [one.passage.position for one in found.passages] == np.argsort(-means, kind="stable")[:3].tolist()
    assert [one.score for one in found.passages] == pytest.approx(np.sort(means)[::-1][:3])


@pytest.mark.parametrize("slots", [False, True])
def test_only_some_positions(whole, slots):
    found = whole.ask(PROMPT, top=400, where="token = 'e' and text_position < 60", slots=slots).passages
    assert {(one.passage.token, one.passage.position < 60) for one in found} == {("e", True)}
    first = found[0].passage.position
    rest = whole.ask(PROMPT, top=400, where="token = 'e' and text_position < 60", slots=slots, without=[first]).passages
    assert [one for one in (f.passage.position for f in found) if one != first] == [f.passage.position for f in rest]
    assert whole.ask(PROMPT, where="token = '🧀'", slots=slots).passages[0].passage.token == "🧀"
    assert whole.ask(PROMPT, where="text_position < 0", slots=slots).passages == []


def test_only_some_steps(whole):
    early = whole.ask(PROMPT, top=1000, where="step < 2")
    assert sum(one.visits for one in early.passages) == 2 * 40
    assert {one.step for one in whole.ask(PROMPT, top=30, where="step < 2", slots=True).passages} <= {0, 1}


def test_single_slots(whole):
    weights = torch.cat([w.scores[0, -1] for w in whole.dual.attend(whole.text.encode(PROMPT)[None])["lstm"].scores()])
    found = whole.ask(PROMPT, top=4, slots=True).passages
    assert [one.score for one in found] == pytest.approx(weights.sort(descending=True).values[:4].tolist(), rel=1e-5)


def test_contributions_split_by_gate_and_by_part(whole):
    tokens = whole.text.encode(PROMPT)
    target = whole.text.numbers[" "]
    all_of_it = whole.contributions(tokens, target)
    gates = sum(whole.contributions(tokens, target, gate=gate).scores for gate in "ifgo")
    parts = sum(whole.contributions(tokens, target, part=part).scores for part in ("input", "recurrent"))
    np.testing.assert_allclose(gates, all_of_it.scores, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(parts, all_of_it.scores, rtol=1e-3, atol=1e-6)
    asked = whole.ask(PROMPT, target=" ", gate="f", top=2)
    assert asked.score == "contribution to the logit of ' ' through gate f, sum over visits"
    expected = whole.contributions(tokens, target, gate="f").scores
    assert asked.passages[0].score == pytest.approx(expected.max(), rel=1e-4)
    assert whole.ask(PROMPT, gate="f").score.startswith(f"contribution to the logit of {asked.following[0][0]!r}")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"prompt": ""}, QuestionError, "the prompt is empty"),
        ({"prompt": "Don't"}, QuestionError, "not among the .* characters of story's vocabulary: \"'\" \\(but ’\\)"),
        ({"prompt": "a" * 10_000}, QuestionError, "the prompt has 10,000 characters, more than the training text"),
        ({"top": 0}, QuestionError, "top 0: expected at least 1"),
        ({"part": "gates"}, QuestionError, "part 'gates': expected one of 'both', 'input', 'recurrent'"),
        ({"gate": "f"}, NotRecordedError, "contributions need error signals, and .* keeps totals only"),
        ({"slots": True}, NotRecordedError, "single slots: .* keeps totals only"),
        ({"where": "foo = 1"}, MaskError, "no column 'foo'. Columns: text_position, token, title, step"),
        ({"where": "token = 'e' and step = 1"}, MaskError, "token or title do not go together with step"),
        ({"where": "token"}, MaskError, "expected true or false"),
        ({"where": "token ="}, MaskError, "is not an SQL condition"),
    ],
)
def test_questions_that_cannot_be_answered(kept, options, error, said):
    with pytest.raises(error, match=said):
        kept.ask(**{"prompt": PROMPT, **options})


def test_targets_and_gates_that_are_not_there(whole):
    with pytest.raises(QuestionError, match="target 'th': expected one character"):
        whole.ask(PROMPT, target="th")
    with pytest.raises(QuestionError, match="gate 'x': expected one of 'i', 'f', 'g', 'o'"):
        whole.ask(PROMPT, gate="x")


def test_plain_data(kept):
    found = kept.ask(PROMPT, top=1).to_dict()
    assert set(found["passages"][0]["passage"]) == {"position", "title", "before", "token", "after"}
    assert pl.DataFrame(found["passages"]).height == 1


def test_positions_left_out_and_conditions_on_steps_go_together(whole):
    found = whole.ask(PROMPT, top=400, where="step < 2", slots=True).passages
    gone = {one.passage.position for one in found[:3]}
    left = whole.ask(PROMPT, top=400, where="step < 2", slots=True, without=gone).passages
    assert [(one.passage.position, one.step) for one in left] == [
        (one.passage.position, one.step) for one in found if one.passage.position not in gone
    ]
