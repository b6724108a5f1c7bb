import time
from concurrent.futures import ThreadPoolExecutor

import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.errors import ModelMismatchError, NotRecordedError, QuestionError, StoreMissingError, UnknownLayerError
from training import assert_same_weights, network, samples, train

INPUTS, LABELS = samples()


def test_what_it_says_about_itself(trained):
    dual = trained.dual
    info = dual.info()
    assert info["steps"] == 6
    assert info["rows"] == 30
    assert info["keep"] == "slots"
    assert info["dtype"] == "float64"
    assert info["ended"] == "closed"
    assert info["columns"] == {"sample_id": "Int64 per row", "label": "Int64 per row", "task": "String per row"}
    assert [(entry["name"], entry["d_in"], entry["d_out"], entry["slots"]) for entry in info["layers"]] == [
        ("0", 5, 7, 30),
        ("2", 7, 4, 30),
    ]
    assert info["left_out"] == {}
    assert info["bytes"] > 30 * (5 + 7) * 8
    snapshots = sum(path.stat().st_size for path in trained.path.glob("snapshot-*"))
    assert 0 < info["snapshot_bytes"] == snapshots < info["bytes"]
    assert dual.layers == ["0", "2"]
    assert "after 6 steps" in repr(dual)


def test_the_optimizers_state_at_a_snapshot(tmp_path):
    optimizers = []

    def optimizer(model):
        optimizers.append(torch.optim.Adam(model.parameters(), lr=0.01))
        return optimizers[0]

    run = train(tmp_path / "run", optimizer=optimizer)
    states = run.dual.optimizer_state()
    assert list(states) == sorted(name for name, _ in run.model.named_parameters())
    for name, parameter in run.model.named_parameters():
        expected = optimizers[0].state[parameter]
        assert set(states[name]) == {"exp_avg", "exp_avg_sq", "step"}
        for key, value in states[name].items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    assert run.dual.at(0).optimizer_state() == {}
    with pytest.raises(NotRecordedError, match="there is no snapshot at step 3"):
        run.dual.at(3).optimizer_state()


def test_rows_and_log(trained):
    assert trained.dual.rows.columns == ["step", "sample_id", "label", "task"]
    assert trained.dual.rows["sample_id"].to_list() == torch.cat(trained.ids).tolist()
    assert trained.dual.log.columns == ["step", "loss"]
    assert trained.dual.log.height == 6


def test_without_a_model(trained):
    dual = dualform.open(trained.path)
    assert dual.info() == trained.dual.info()
    assert dual.verify().passed
    for question in (
        lambda: dual.masked(only=pl.lit(True)),
        lambda: dual.at(3).model(),
        lambda: dual.contributions(INPUTS),
    ):
        with pytest.raises(QuestionError, match=r"needs the model: dualform\.open\(path, model\)"):
            question()


def test_a_path_as_text(trained):
    assert dualform.open(str(trained.path)).info() == trained.dual.info()


def test_no_recording(tmp_path):
    with pytest.raises(StoreMissingError, match="holds no recording"):
        dualform.open(tmp_path / "nowhere")


def test_a_model_with_other_names(trained):
    with pytest.raises(ModelMismatchError, match=r"has a parameter '0\.weight', the model has none.*has: weight, bias"):
        dualform.open(trained.path, nn.Linear(5, 4))


def test_a_model_with_other_shapes(trained):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(ModelMismatchError, match=r"'0\.weight' has shape \(7, 5\) in the recording and \(8, 5\) in"):
        dualform.open(trained.path, model)


def test_a_model_without_a_bias_that_was_recorded(trained):
    with pytest.raises(ModelMismatchError, match=r"'0\.bias'"):
        dualform.open(trained.path, network(bias=False))


def test_the_model_is_not_changed(trained):
    model = network(seed=9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dual = dualform.open(trained.path, model)
    dual.attend(INPUTS)["2"].top(3)
    dual.contributions(INPUTS)["2"].top(3)
    dual.masked(drop=pl.col("label") == 1)
    dual.at(3).model()
    assert_same_weights(model, before, atol=0)
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not model._forward_hooks
    assert not model[0]._forward_hooks


def test_weights_come_from_the_store(trained):
    other = dualform.open(trained.path, network(seed=9))
    assert other.attend(INPUTS)["2"].top(3).equals(trained.dual.attend(INPUTS)["2"].top(3))
    assert_same_weights(other.model(), trained.model.state_dict(), atol=0)


@pytest.mark.parametrize("step", range(7))
def test_at_step_is_the_checkpoint_of_that_step(trained, step):
    assert_same_weights(trained.dual.at(step).model(), trained.checkpoints[step], atol=1e-14)


@pytest.mark.parametrize("step", [0, 2, 6])
def test_until_is_the_dual_of_that_moment(trained, step):
    past = trained.dual.at(step)
    assert past.end_step == step
    assert past.rows.height == past.layer("0").slots == 5 * step
    assert past.log.height == step
    assert_same_weights(past.model(), trained.checkpoints[step], atol=1e-14)
    assert past.attend(INPUTS)["0"].top(100)["step"].max() == (step - 1 if step else None)
    hidden = torch.tanh(INPUTS @ trained.checkpoints[step]["0.weight"].T + trained.checkpoints[step]["0.bias"])
    torch.testing.assert_close(past.attend(INPUTS)["2"].queries[:, 0], hidden, rtol=0, atol=1e-13)


def test_contributions_and_masks_of_an_earlier_moment(trained):
    past = trained.dual.at(4)
    logits = past.model()(INPUTS)[:, 2].tolist()
    parts = past.contributions(INPUTS, target=2)["2"].parts()
    assert (parts["initial"] + parts["slots"]).to_list() == pytest.approx(logits, rel=1e-11)
    assert_same_weights(past.masked(only=pl.lit(True)), trained.checkpoints[4], atol=1e-14)
    assert_same_weights(past.at(2).model(), trained.checkpoints[2], atol=1e-14)


@pytest.mark.parametrize("step", [-1, 7, 2.0, "3", True, None])
def test_a_step_out_of_range(dual, step):
    for question in (dual.at,):
        with pytest.raises(QuestionError, match=r"step .*: expected a whole number from 0 to 6"):
            question(step)


def test_a_moment_after_the_moment(dual):
    with pytest.raises(QuestionError, match="from 0 to 3"):
        dual.at(3).at(4)


def test_unknown_layer(dual):
    with pytest.raises(UnknownLayerError, match=r"'nope' was not recorded\. Recorded layers: '0', '2'"):
        dual.layer("nope")


def test_what_was_not_recorded_comes_from_a_snapshot_and_is_named(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)).double()
    run = train(tmp_path / "run", model=model)
    with pytest.warns(
        UserWarning,
        match=r"snapshot at step 0 instead of step 3: 1\.num_batches_tracked, 1\.running_mean, 1\.running_var$",
    ):
        model = run.dual.at(3).model()
    torch.testing.assert_close(model[0].weight.detach(), run.checkpoints[3]["0.weight"], rtol=0, atol=1e-13)
    torch.testing.assert_close(model[1].weight.detach(), run.checkpoints[3]["1.weight"], rtol=0, atol=1e-13)
    assert torch.equal(model[1].running_mean, run.checkpoints[0]["1.running_mean"])
    assert_same_weights(run.dual.at(6).model(), run.checkpoints[6], atol=0)


def test_where_each_slot_comes_from(trained):
    dual = trained.dual.at(4)
    found = dual.slots("2")
    assert found["row"].to_list() == list(range(20))
    assert found["step"].to_list() == dual.rows["step"].to_list()
    with pytest.raises(UnknownLayerError):
        dual.slots("9")


def test_reopened_it_knows_totals_that_were_built(tmp_path):
    dual = train(tmp_path / "run").dual
    dualform.build_totals(tmp_path / "run", "label")
    assert dual.info()["totals"] == []
    assert [kept["by"] for kept in dual.reopened().info()["totals"]] == [["label"]]


@pytest.mark.parametrize("question", ["attend", "contributions"])
def test_two_threads_do_not_see_each_other(trained, question):
    """A forward pass that takes its time, while another question is asked of the same dual."""
    dual = trained.dual
    alone = [getattr(dual, question)(INPUTS[n : n + 1])["2"].total("label") for n in range(4)]
    dual._query_model.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: getattr(dual, question)(INPUTS[n : n + 1])["2"].total("label"), range(4)))
    assert [one.to_dicts() for one in found] == [one.to_dicts() for one in alone]
