import polars as pl
import pytest
import torch
from torch.nn import functional as F

import dualform
from dualform.dual.coefficients import updates_of, walked
from dualform.errors import MaskError, QuestionError, UnknownLayerError
from training import assert_same_weights, network, samples, sgd, train

INPUTS, LABELS = samples()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def weights_where(dual, where):
    return [scores.slots.tolist() for scores in dual.attend(INPUTS[:1])["0"].scores(where=where)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (pl.col("task") == "early", lambda slot, row: slot < 15),
        ("task = 'early'", lambda slot, row: slot < 15),
        (pl.col("step") >= 4, lambda slot, row: slot >= 20),
        (pl.col("label").is_in([1, 2]) & (pl.col("step") < 3), lambda slot, row: row["label"] in (1, 2) and slot < 15),
        (pl.col("position") == 0, lambda slot, row: True),
        (pl.col("position") > 0, lambda slot, row: False),
        ((pl.col("position") == 0) & (pl.col("label") == 1), lambda slot, row: row["label"] == 1),
        (pl.lit(True), lambda slot, row: True),
        ("false", lambda slot, row: False),
        (pl.col("sample_id") > pl.col("sample_id").mean(), lambda slot, row: row["above"]),
    ],
)
def test_conditions_on_rows_steps_and_positions(dual, where, expected):
    rows = dual.rows.with_columns(above=pl.col("sample_id") > pl.col("sample_id").mean()).to_dicts()
    found = [slot for slots in weights_where(dual, where) for slot in slots]
    assert found == [slot for slot, row in enumerate(rows) if expected(slot, row)]


def test_a_mask_over_an_earlier_moment_sees_only_its_rows(dual):
    found = weights_where(dual.at(2), pl.col("step") == pl.col("step").max())
    assert found == [[5, 6, 7, 8, 9]]


@pytest.mark.parametrize("where", [pl.col("label") == 1, pl.col("position") > 0])
def test_a_mask_over_an_earlier_moment_where_an_optimizer_is_replayed(tmp_path, where):
    """The moment lies within a chunk, whose later rows are not part of the question."""
    whole = train(tmp_path / "whole", optimizer=adam)
    short = train(tmp_path / "short", optimizer=adam, steps=3)
    expected = short.dual.masked(drop=where)
    assert_same_weights(whole.dual.at(3).masked(drop=where), expected.state_dict())


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (pl.col("colour") == "red", r"no column 'colour'\. Columns: step, position, sample_id, label, task"),
        ("colour = 'red'", r"no column 'colour'"),
        (pl.col("label"), r"gives Int64, expected true or false for each row"),
        (pl.when(pl.col("label") == 1).then(True), r"is null for \d+ rows\. Say what null means.*fill_null"),
        (pl.col("label").unique() == 1, r"gives \d+ values for 30 rows|cannot be evaluated"),
        (pl.col("label") == "one", r"cannot be evaluated over the rows"),
        ("label ==== 1", r"'label ==== 1' is not an SQL condition"),
        (lambda row: True, r"got function, expected a Polars expression.*or SQL"),
        (True, r"got bool, expected a Polars expression"),
    ],
)
def test_what_is_no_condition(dual, where, words):
    with pytest.raises(MaskError, match=rf"where: .*{words}"):
        weights_where(dual, where)
    with pytest.raises(MaskError, match=rf"only: .*{words}"):
        dual.masked(only=where)
    with pytest.raises(MaskError, match=rf"drop: .*{words}"):
        dual.masked(drop=where)


def test_an_expression_that_is_deeper_than_pythons_stack_is_answered(tmp_path):
    """With totals the expression is looked into; where it is too deep for that, slots answer."""
    run = train(tmp_path / "run", totals=["label"])
    deep = pl.col("label")
    for _ in range(500):
        deep = deep + 0
    assert_same_weights(run.dual.masked(drop=deep == 1), run.dual.masked(drop=pl.col("label") == 1).state_dict())


def test_sql_is_no_code(dual):
    with pytest.raises(MaskError):
        weights_where(dual, "__import__('os').getcwd() = 'x'")


@pytest.mark.parametrize("everything", [pl.col("step") >= 0, pl.lit(True), "step >= 0", pl.col("position") >= 0])
def test_keeping_everything_is_the_model(trained, everything):
    for read in ("kept", "fewest"):
        assert_same_weights(trained.dual.masked(only=everything, read=read), trained.model.state_dict())


def test_dropping_nothing_is_the_model(trained):
    assert_same_weights(trained.dual.masked(drop=pl.lit(False)), trained.model.state_dict())


def test_a_mask_takes_away_what_its_slots_wrote(trained):
    """By a plain sum over slots, weight and bias."""
    dual = trained.dual
    layer = dual.layer("2")
    dropped = [slot for slot, row in enumerate(dual.rows.to_dicts()) if row["label"] == 1]
    assert 0 < len(dropped) < 30
    weight, bias = trained.model[2].weight.detach().clone(), trained.model[2].bias.detach().clone()
    c = walked(updates_of(dual.store, "2.bias")).walked.c
    errors = torch.cat([chunk.errors(torch.float64) for chunk in dual.store.chunks("2")])
    for slot in dropped:
        weight -= torch.outer(layer.values[slot], layer.keys[slot])
        bias -= -c[slot // 5] * errors[slot]
    masked = dual.masked(drop=pl.col("label") == 1)
    torch.testing.assert_close(masked[2].weight.detach(), weight, rtol=0, atol=1e-14)
    torch.testing.assert_close(masked[2].bias.detach(), bias, rtol=0, atol=1e-14)


def test_only_is_the_opposite_of_drop(dual):
    kept, dropped = dual.masked(only=pl.col("label") == 1), dual.masked(drop=pl.col("label") != 1)
    assert_same_weights(kept, dropped.state_dict(), atol=0)


def test_only_some_layers(trained):
    masked = trained.dual.masked(drop=pl.col("task") == "late", layers="2")
    assert torch.equal(masked[0].weight, trained.model[0].weight)
    assert not torch.equal(masked[2].weight, trained.model[2].weight)
    with pytest.raises(UnknownLayerError, match=r"'7' was not recorded.*'0', '2'"):
        trained.dual.masked(drop=pl.col("task") == "late", layers=["2", "7"])


def test_without_momentum_and_decay_dropping_the_later_steps_is_going_back(tmp_path):
    run = train(tmp_path / "run", optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert_same_weights(run.dual.masked(drop=pl.col("step") >= 3), run.checkpoints[3])


def test_it_is_a_plain_module_and_the_model_stays_as_it_is(trained):
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    masked = trained.dual.masked(drop=pl.col("label") == 1)
    assert type(masked) is type(trained.model)
    assert masked is not trained.model
    assert masked(INPUTS).shape == (12, 4)
    assert_same_weights(trained.model, before, atol=0)


@pytest.mark.parametrize("settings", [{}, {"only": pl.lit(True), "drop": pl.lit(True)}])
def test_one_of_only_and_drop(dual, settings):
    with pytest.raises(QuestionError, match=r"needs one of only= and drop=.*e\.g\."):
        dual.masked(**settings)


def test_which_slots_are_read(dual):
    with pytest.raises(QuestionError, match=r"read='all': expected \"fewest\" or \"kept\""):
        dual.masked(only=pl.lit(True), read="all")


def test_null_never_passes_silently(tmp_path):
    """A column per position, asked of a layer that has other positions."""
    torch.manual_seed(0)

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = torch.nn.Linear(5, 3), torch.nn.Linear(3, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.tokens(x)).mean(1))

    model = Pooled().double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64") as recorder:
        recorder.batch(sample_id=range(12), token=torch.arange(24).reshape(12, 2))
        F.cross_entropy(model(torch.stack([INPUTS, -INPUTS], 1)), LABELS).backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    inputs = torch.stack([INPUTS, -INPUTS], 1)
    found = dual.attend(inputs)["tokens"].top(30, where=pl.col("token") < 6)
    assert found["token"].unique().sort().to_list() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(MaskError, match=r"'token' has an entry for each position.*layer 'head'.*columns per row"):
        dual.attend(inputs)["head"].top(3, where=pl.col("token") < 6)


def test_a_model_with_other_weights_gives_the_same_answer(trained):
    """The model gives the architecture; weights come from the store."""
    other = dualform.open(trained.path, network(seed=9))
    expected = trained.dual.masked(drop=pl.col("label") == 1)
    assert_same_weights(other.masked(drop=pl.col("label") == 1), expected.state_dict(), atol=0)
