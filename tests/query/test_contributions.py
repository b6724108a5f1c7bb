import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.dual.coefficients import updates_of, walked
from dualform.errors import QuestionError, RecordingError
from dualform.store import slots
from reference import attention as reference
from reference import ranking
from training import samples, train

INPUTS, LABELS = samples()


def all_contributions(answer):
    return torch.cat([scores for _, scores in answer.scores()], dim=-1)


def by_plain_loops(run, layer, queries, gradients):
    """From the stored slots: (queries, slots)."""
    dual = run.dual
    found = dual.layer(layer)
    errors = torch.cat([chunk.errors(torch.float64) for chunk in dual.store.chunks(layer)])
    c = walked(updates_of(dual.store, f"{layer}.bias")).walked.c
    bias_values = [(-c[slot // 5] * error).tolist() for slot, error in enumerate(errors)]
    return reference.contributions(
        found.keys.tolist(), found.values.tolist(), bias_values, queries.tolist(), gradients.tolist()
    )


def test_in_the_last_layer_by_plain_loops(trained):
    hidden = trained.model[:2](INPUTS).detach()
    one_hot = torch.zeros(12, 4)
    one_hot[:, 3] = 1
    expected = by_plain_loops(trained, "2", hidden, one_hot)
    found = all_contributions(trained.dual.contributions(INPUTS, target=3)["2"])
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.ReLU(inplace=True)])
def test_in_a_hidden_layer_by_plain_loops(tmp_path, activation):
    torch.manual_seed(0)
    run = train(tmp_path / "run", model=nn.Sequential(nn.Linear(5, 7), activation, nn.Linear(7, 4)).double())
    first, _, last = run.model
    output = first(INPUTS).detach().requires_grad_()
    last(activation(output * 1.0))[:, 1].sum().backward()
    expected = by_plain_loops(run, "0", INPUTS, output.grad)
    found = all_contributions(run.dual.contributions(INPUTS, target=1)["0"])
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("precision", "dtype", "bar"),
    [(torch.float64, "float64", 1e-12), (torch.float32, "float32", 1e-4), (torch.float32, "float64", 1e-4)],
)
@pytest.mark.parametrize("target", [None, 2, LABELS])
def test_in_the_last_layer_they_add_up_to_the_logit(tmp_path, precision, dtype, bar, target):
    run = train(tmp_path / "run", precision=precision, dtype=dtype, steps=10)
    logits = run.model(INPUTS.to(precision)).detach().double()
    chosen = logits.argmax(1) if target is None else torch.as_tensor(target).expand(12)
    logit = logits[torch.arange(12), chosen]
    parts = run.dual.contributions(INPUTS.to(precision), target=target)["2"].parts()
    total = parts["initial"] + parts["slots"]
    assert parts["target"].to_list() == pytest.approx(logit.tolist(), rel=bar)
    assert total.to_list() == pytest.approx(logit.tolist(), rel=bar, abs=bar * 0.1)
    size = parts["initial"].abs() + parts["slots"].abs()
    assert (parts["remainder"].abs() / size).max() <= bar
    everything = all_contributions(run.dual.contributions(INPUTS.to(precision), target=target)["2"]).sum(1)
    assert parts["slots"].to_list() == pytest.approx(everything.tolist(), rel=bar)


def test_totals_of_the_last_layer_add_up_too(trained):
    answer = trained.dual.contributions(INPUTS, target=0)["2"]
    initial = answer.parts()["initial"]
    for by in ("label", "task", "step", "sample_id", "position"):
        sums = answer.total(by).group_by("query", maintain_order=True).agg(pl.col("total").sum())["total"]
        logits = trained.model(INPUTS)[:, 0].tolist()
        assert (initial + sums).to_list() == pytest.approx(logits, rel=1e-12, abs=1e-13)


def test_in_hidden_layers_the_remainder_is_shown(trained):
    parts = trained.dual.contributions(INPUTS, target=0)["0"].parts()
    assert parts["remainder"].abs().min() > 1e-6
    total = parts["initial"] + parts["slots"] + parts["remainder"]
    assert total.to_list() == pytest.approx(trained.model(INPUTS)[:, 0].tolist(), rel=1e-12, abs=1e-13)


def test_without_a_bias_they_add_up(tmp_path):
    torch.manual_seed(0)
    run = train(tmp_path / "run", model=nn.Linear(5, 4, bias=False).double())
    parts = run.dual.contributions(INPUTS, target=1)[""].parts()
    assert (parts["initial"] + parts["slots"]).to_list() == pytest.approx(run.model(INPUTS)[:, 1].tolist(), rel=1e-12)
    assert parts["remainder"].abs().max() < 1e-14


def test_top_and_lowest_are_signed(trained):
    answer = trained.dual.contributions(INPUTS, target=2)["2"]
    scores = all_contributions(answer).tolist()
    top, low, large = answer.top(4), answer.top(4, lowest=True), answer.top(4, absolute=True)
    assert top.columns[:4] == ["query", "rank", "contribution", "slot"]
    for query in range(12):
        for frame, key in ((top, lambda x: x), (low, lambda x: -x), (large, abs)):
            mine = frame.filter(pl.col("query") == query)
            assert mine["slot"].to_list() == ranking.top([key(score) for score in scores[query]], 4)
            expected = [scores[query][slot] for slot in mine["slot"].to_list()]
            assert mine["contribution"].to_list() == pytest.approx(expected, rel=1e-12)


def test_the_default_target_is_the_largest_output(trained):
    best = trained.model(INPUTS).argmax(1)
    default, told = trained.dual.contributions(INPUTS), trained.dual.contributions(INPUTS, target=best)
    assert default["2"].top(3).equals(told["2"].top(3))


def test_a_target_of_the_users_own(trained):
    def margin(output):
        return output[:, 0] - output[:, 1]

    parts = trained.dual.contributions(INPUTS, target=margin)["2"].parts()
    expected = margin(trained.model(INPUTS)).tolist()
    assert (parts["initial"] + parts["slots"]).to_list() == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (4, "target=4: the output has units 0 to 3"),
        (-1, "target=-1: the output has units 0 to 3"),
        ([0, 1], r"target=\[0, 1\]: expected a unit from 0 to 3, or one for each of 12 examples"),
        (0.5, r"target=0\.5: expected a unit"),
        (lambda output: output, r"target\(output\) gave \(12, 4\); expected.*one number for each of 12 examples"),
        (lambda output: 3, r"target\(output\) gave int"),
    ],
)
def test_targets_that_make_no_sense(dual, target, words):
    with pytest.raises(QuestionError, match=words):
        dual.contributions(INPUTS, target=target)


def test_an_output_that_needs_a_target(tmp_path):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(5, 4)

        def forward(self, x):
            y = self.map(x)
            return y if self.training else {"classes": y}

    torch.manual_seed(0)
    run = train(tmp_path / "run", model=Nested().double(), steps=2)
    with pytest.raises(QuestionError, match=r"output is dict, not \(12, units\)\. Say what the target is"):
        run.dual.contributions(INPUTS)
    parts = run.dual.contributions(INPUTS, target=lambda output: output["classes"][:, 0])["map"].parts()
    assert parts["remainder"].abs().max() < 1e-14


def test_positions_of_the_query_are_summed(tmp_path):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(5, 4)

        def forward(self, x):
            return self.map(torch.stack([x, -2 * x, x * x], 1)).sum(1)

    torch.manual_seed(0)
    run = train(tmp_path / "run", model=Pooled().double(), steps=3)
    answer = run.dual.contributions(INPUTS, target=1)["map"]
    assert all_contributions(answer).shape == (12, 3 * 5 * 3)
    parts = answer.parts()
    assert (parts["initial"] + parts["slots"]).to_list() == pytest.approx(run.model(INPUTS)[:, 1].tolist(), rel=1e-11)


@pytest.mark.parametrize("size", [1, 2000])
def test_pieces_of_any_size_give_the_same(trained, monkeypatch, size):
    expected = all_contributions(trained.dual.contributions(INPUTS, target=0)["2"])
    monkeypatch.setattr(slots, "PIECE_BYTES", size)
    found = all_contributions(trained.dual.contributions(INPUTS, target=0)["2"])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_memory_counts_the_positions_of_the_queries(tmp_path, monkeypatch):
    """A tile is examples × positions × slots: none may be larger than a piece."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(5, 4)

        def forward(self, x):
            return self.map(x.unsqueeze(1).expand(-1, 50, -1)).mean(1)

    torch.manual_seed(0)
    run = train(tmp_path / "run", model=Tokens().double(), steps=2)
    answer = run.dual.contributions(INPUTS, target=0)["map"]
    monkeypatch.setattr(slots, "PIECE_BYTES", 8 * 12 * 50 * 20)
    sizes = [scores.shape[1] for _, scores in answer.scores()]
    assert sum(sizes) == 500
    assert max(sizes) <= 20


def test_they_need_the_model(trained):
    with pytest.raises(QuestionError, match=r"needs the model: dualform\.open\(path, model\)"):
        dualform.open(trained.path).contributions(INPUTS)


def test_the_gradients_of_the_users_model_are_left_alone(trained):
    before = [p.grad.clone() for p in trained.model.parameters()]
    trained.dual.contributions(INPUTS)["2"].top(2)
    assert all(torch.equal(p.grad, g) for p, g in zip(trained.model.parameters(), before, strict=True))


def test_the_initial_part_has_the_name_that_record_was_given(tmp_path, trained):
    run = train(tmp_path / "run", chunk_bytes=2000, initial="pretrained")
    answer = run.dual.contributions(INPUTS, target=2)["2"]
    assert answer.parts().columns == ["query", "pretrained", "slots", "remainder", "rounding", "target"]
    expected = trained.dual.contributions(INPUTS, target=2)["2"].parts()["initial"]
    assert answer.parts()["pretrained"].to_list() == expected.to_list()
    assert run.dual.info()["initial"] == "pretrained"
    assert trained.dual.info()["initial"] == "initial weights"


def test_a_resumed_recording_keeps_that_name(tmp_path):
    run = train(tmp_path / "run", initial="pretrained", steps=2)
    train(tmp_path / "run", resume=0)
    assert run.dual.info()["initial"] == "pretrained"


@pytest.mark.parametrize("name", ["slots", "target", " "])
def test_names_of_other_parts_are_refused(tmp_path, name):
    with pytest.raises(RecordingError, match="expected a word for the weights"):
        train(tmp_path / "run", initial=name)
