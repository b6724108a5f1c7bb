"""Networks of every kind of layer: each trained for real in float64, rebuilt, asked and masked."""

import polars as pl
import pytest
import torch

from recorded_networks import (
    NETWORKS,
    OPTIMIZERS,
    SAMPLES,
    STEPS,
    WITHOUT_EPS,
    Attention,
    assert_close,
    assert_exact,
    parameters,
    quiet_about_buffers,
    target,
    train,
)

FEW = ("cnn", "sequences", "lstm", "packed gru", "lstm cells", "decoder", "gpt", "norms")
"""The networks that are trained by every optimizer; the others by two."""
RUNS = [f"{n}: {o}" for n in NETWORKS for o in OPTIMIZERS if n in FEW or o != "rmsprop"]
RUNS += [f"{n}: {o}" for n in ("cnn", "lstm", "gpt", "decoder") for o in WITHOUT_EPS]


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """Nobody may change it."""
    network, optimizer = request.param.split(": ")
    return train(network, optimizer, tmp_path_factory.mktemp("run") / "run", chunk_bytes=20_000)


# Every network under every optimizer


def test_each_parameter_is_its_dual_form(run):
    assert_exact(run.dual)
    assert {name for name, _ in run.model.named_parameters()} == {p.name for p in run.dual.store.manifest.parameters}
    assert run.dual.info()["left_out"] == {}


def test_a_step_in_the_middle_is_the_checkpoint(run):
    with quiet_about_buffers(run.model):
        found = run.dual.at(STEPS // 2).model()
    assert_close(parameters(found), run.checkpoints[STEPS // 2])
    assert_close(dict(run.dual.at(0).model().state_dict()), run.checkpoints[0], atol=0)
    assert_close(dict(run.dual.at(STEPS).model().state_dict()), run.checkpoints[STEPS], atol=0)


def test_a_mask_and_its_opposite_add_up(run):
    condition = (pl.col("label") < 2) | (pl.col("step") == 1)
    one, other = (parameters(run.dual.masked(**{how: condition}, read="kept")) for how in ("only", "drop"))
    nothing = parameters(run.dual.masked(only=pl.lit(False), read="kept"))
    assert_close({n: one[n] + other[n] - nothing[n] for n in one}, run.checkpoints[-1])
    assert_close(parameters(run.dual.masked(only=pl.lit(True), read="kept")), run.checkpoints[-1])
    assert_close(parameters(run.dual.masked(only=condition)), one)  # with fewer slots, the same


def test_contributions_in_the_last_layer_add_up_to_the_logit(run):
    logits = target(run.model.eval()(run.inputs)).tolist()
    parts = run.dual.contributions(run.inputs, target=target)["head"].parts()
    assert parts["target"].to_list() == pytest.approx(logits, rel=1e-12, abs=1e-13)
    others = 0.0
    if isinstance(run.model, Attention):  # there the head is not all
        others = run.model.attention(run.inputs, run.inputs[..., :4], run.inputs[..., 3:])[1].square().sum(2)[:, 0]
        others = pl.Series(others.tolist())
    assert (parts["remainder"] - others).abs().max() <= 1e-12


def test_contributions_in_every_layer_are_what_a_mask_takes_away(run):
    """Σ contributions of some slots = ⟨∂target/∂parameter, what these slots wrote⟩, by autograd and by masks."""
    condition = (pl.col("label") != 1) & (pl.col("step") > 0)
    queries, dual, model = run.inputs[:3], run.dual, run.model.eval()
    with_them, nothing = (parameters(dual.masked(only=some, read="kept")) for some in (condition, pl.lit(False)))
    slopes = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in target(model(queries))]
    products = {  # like the parameter, for each query
        name: torch.stack([slope[place] for slope in slopes]) * (with_them[name] - nothing[name])
        for place, name in enumerate(with_them)
    }
    answers, together = dual.contributions(queries, target=target), torch.zeros(3, dtype=torch.float64)
    for layer in dual.store.manifest.layers:
        answer = answers[layer.name]
        all_scores = [some for one in (answer, *answer.tied.values()) for some in one.scores(where=condition)]
        found = sum(scores.sum(1) for _, scores in all_scores)
        together += found
        if not answer.tied:
            parts = [products[u.parameter][:, slice(*u.rows) if u.rows else slice(None)] for u in layer.uses]
            expected = sum(part.flatten(1).sum(1) for part in parts)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda t, y=layer: f"{y.name}: {t}")
    torch.testing.assert_close(together, sum(p.flatten(1).sum(1) for p in products.values()), rtol=1e-9, atol=1e-12)


# Training is what it was


@pytest.mark.parametrize("network", NETWORKS)
def test_training_is_bitwise_the_same(path, network):
    """Dropout too: the random numbers that are drawn again are put back."""
    recorded, plain = train(network, "adamw", path, steps=3), train(network, "adamw", steps=3)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(recorded.model.state_dict()[name], value), name
    assert torch.equal(recorded.rng, plain.rng)


# Tied weights


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tied_weights_have_slots_from_both_layers(path, optimizer):
    run = train("gpt", optimizer, path)
    dual = run.dual
    users = [layer.name for layer in dual.store.users("tokens.weight")]
    assert users == ["tokens", "head"]
    answers = dual.contributions(run.inputs, target=target)
    assert list(answers["head"].tied) == ["tokens"]
    assert list(answers["tokens"].tied) == ["head"]
    assert answers["up"].tied == answers["attention.q"].tied == {}
    own, other = (one.total("label")["total"].to_numpy().reshape(SAMPLES, -1).sum(1) for one in (answers["head"], answers["head"].tied["tokens"]))  # fmt: skip
    parts = answers["head"].parts()
    assert parts["slots"].to_list() == pytest.approx((own + other).tolist(), rel=1e-11)
    assert abs(other).max() > 1e-3
    assert parts["remainder"].abs().max() <= 1e-12
    without = dual.masked(drop=pl.col("label") == 1)
    assert without.head.weight is without.tokens.weight


def test_padding_is_never_written_to(path):
    """The row of padding_idx moves by what the head writes alone."""
    run = train("gpt", "sgd", path)
    chunk = next(run.dual.store.chunks("tokens"))
    numbers, errors = chunk.keys(torch.float64).places, chunk.errors(torch.float64)
    assert (numbers == 0).any()
    assert not errors[numbers == 0].any()
    assert errors[numbers != 0].any()
