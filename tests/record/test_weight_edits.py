"""Weights, gradients and optimizer states that something else than the optimizer changes: noticed, or recorded as an edit."""

import copy

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import UnexplainedError
from plain_loops import GAPS, assert_exact, batches, network, sgd, train

pytestmark = pytest.mark.usefixtures("precision")


def test_weights_moved_by_hand_are_an_error_that_names_them(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with pytest.raises(UnexplainedError, match=r"layer '0', step 2: '0.weight' was changed"):
        with dualform.record(model, optimizer, path) as recorder:
            for number, (ids, x, y) in enumerate(batches(4)):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if number == 2:
                    model[0].weight.data.mul_(0.99)
                optimizer.step()


def test_optimizer_state_loaded_between_backward_pass_and_step(path):
    """New groups, with the same parameters: nothing has happened to the gradients."""
    model = network(4, 8, 2)
    optimizer = sgd(model, momentum=0)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(6)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if number == 3:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
    assert_exact(path, model)


@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_with_a_backward_pass_of_its_own(path, first):
    """It reaches parameters past their modules, whose slots do not explain it; the others are what they were."""
    model = network(4, 8, 2)
    optimizer = sgd(model)

    def penalize():
        model[0].weight.square().sum().mul(0.01).backward()

    with dualform.record(model, optimizer, path, on_unexplained="mark") as recorder:
        for ids, x, y in batches(6):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            if first:
                penalize()
            F.mse_loss(model(x), y).backward()
            if not first:
                penalize()
            optimizer.step()
    dual = dualform.open(path, model)
    assert set(dual.store.manifest.inexact) == {"0"}
    gaps = dict(dual.verify().frame.select("parameter", "gap").iter_rows())
    assert max(gaps["2.weight"], gaps["2.bias"]) <= GAPS[torch.get_default_dtype()]


def test_a_layer_that_is_taken_out_of_the_optimizer_while_another_rests(path):
    """As many layers are trained as are updated, but others."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = sgd(layers, momentum=0)
    with dualform.record(layers, optimizer, path) as recorder:
        for number, (ids, x, _) in enumerate(batches(6)):
            recorder.batch(sample_id=ids)
            if number == 3:  # the last one rests with an old gradient, and the first is no longer updated
                optimizer.param_groups[0]["params"] = [*layers[1:].parameters()]
            out = layers[1](layers[0](x))
            if number < 3:
                optimizer.zero_grad()
                out = layers[2](out)
            else:
                layers[:2].zero_grad()
                for p in layers[2].parameters():
                    p.grad.zero_()
            out.square().mean().backward()
            optimizer.step()
    assert_exact(path, layers)


FOREACH = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd, maximize": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-3, maximize=True, weight_decay=0.1, foreach=True
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1, foreach=True),
    "adam, maximize": lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1, maximize=True, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, weight_decay=0.1, foreach=True),
    "radam": lambda parameters: torch.optim.RAdam(parameters, weight_decay=0.1, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, weight_decay=0.1, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, weight_decay=0.1, momentum=0.9, foreach=True),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, weight_decay=0.1, foreach=True),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, weight_decay=0.1, foreach=True),
}


@pytest.mark.parametrize("kind", FOREACH)
def test_an_optimizer_that_writes_to_its_gradients_is_no_other_hook(path, kind):
    model = network(4, 8, 2, dtype=torch.float32)
    optimizer = FOREACH[kind](model.parameters())
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x.float()), y.float()).backward()
            optimizer.step()
    assert dualform.open(path, model).verify().passed


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_hook_that_changes_gradients_after_the_recorder_has_seen_them(path, kind):
    """The update is not the one that was audited: told at the next step."""
    model = network(4, 8, 2, dtype=torch.float32)
    optimizer = kind(model.parameters(), lr=0.1)

    def halve(*_):
        model[2].weight.grad.mul_(0.5)

    with pytest.raises(UnexplainedError, match=r"step 3: '2.weight' had its gradient changed .* runs after"):
        with dualform.record(model, optimizer, path) as recorder:
            for number, (ids, x, y) in enumerate(batches(5)):
                if number == 2:
                    optimizer.register_step_pre_hook(halve)
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                F.mse_loss(model(x.float()), y.float()).backward()
                optimizer.step()


@pytest.mark.parametrize("rows", [1, 3, 10, 17])
@pytest.mark.parametrize("at", range(1, 9))
def test_an_edit_of_a_whole_weight_through_data_never_passes(path, rows, at):
    """Whichever part of the weight has its turn."""
    model = network(4, rows)
    optimizer = sgd(model)
    with pytest.raises(UnexplainedError, match=rf"step {at}: '0.weight' was changed"):
        with dualform.record(model, optimizer, path) as recorder:
            for number, (ids, x, _) in enumerate(batches(10)):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if number == at:
                    model[0].weight.data.mul_(0.99)
                optimizer.step()


def test_weights_swapped_and_put_back_are_no_error(path):
    """An average of weights, swapped in for evaluation."""
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches(4):
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value * 0.5 for name, value in saved.items()})
            with torch.no_grad():
                model(x)
            model.load_state_dict(saved)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert_exact(path, model)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_load_state_dict_in_the_middle(path, what):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with (
        pytest.raises(UnexplainedError, match="load_state_dict"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        for number, (ids, x, y) in enumerate(batches(4)):
            if number == 0:
                first = {k: v.clone() for k, v in model.state_dict().items()}
            if number == 2:
                saved = copy.deepcopy(optimizer.state_dict())
            if number == 3:
                model.load_state_dict(first) if what == "model" else optimizer.load_state_dict(saved)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


def test_mark_lets_the_training_go_on_and_shows_everywhere(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, on_unexplained="mark") as recorder:
        for number, (ids, x, y) in enumerate(batches(6)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if number >= 3:  # the first time is what counts
                nn.utils.clip_grad_value_(model[0].parameters(), 1e-3)
            optimizer.step()
    dual = dualform.open(path, model)
    assert dual.end_step == 6
    assert dual.info()["inexact"]["0"]["step"] == 3
    certificate = dual.verify()
    assert not certificate.passed
    verdicts = dict(certificate.frame.select("parameter", "verdict").iter_rows())
    assert verdicts["0.weight"] == "inexact"
    assert verdicts["2.weight"] == "pass"
    with pytest.warns(dualform.errors.InexactWarning, match=r"'0'.*step 3"):
        dual.attend(torch.zeros(1, 4))
    assert dual.at(3).verify().frame["verdict"].to_list().count("inexact") == 0


def test_an_edit_of_a_single_row_through_data_is_found_by_verify_at_the_latest(path):
    """Of a weight an eighth of the rows is compared before each step."""
    model = network(4, 16, 2, dtype=torch.float32)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, on_unexplained="mark") as recorder:
        for number, (ids, x, y) in enumerate(batches(30)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x.float()), y.float()).backward()
            if number == 10:
                model[0].weight.data[-1, 0] += 1.0
            optimizer.step()
    dual = dualform.open(path, model)
    assert "0" in dual.info()["inexact"] or not dual.verify().passed


def test_an_edit_of_a_bias_through_data_never_passes(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with pytest.raises(UnexplainedError, match=r"step 3: '2.bias' was changed"):
        with dualform.record(model, optimizer, path) as recorder:
            for number, (ids, x, y) in enumerate(batches(5)):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if number == 3:
                    model[2].bias.data[1] += 0.1
                optimizer.step()


def test_the_likely_causes_are_named(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with pytest.raises(UnexplainedError, match=r"clipped by value.*not zeroed.*mark"):
        with dualform.record(model, optimizer, path) as recorder:
            for ids, x, y in batches(3):  # never zeroed
                recorder.batch(sample_id=ids)
                F.mse_loss(model(x), y).backward()
                optimizer.step()


def test_a_marked_step_keeps_its_factors(path):
    """What was found of the gradients is written down, whatever is looked at between."""
    model, factors = network(4, 8, 2), []
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, on_unexplained="mark") as recorder:
        for number, (ids, x, y) in enumerate(batches(6)):
            if number == 3:
                with torch.no_grad():
                    model[0].weight.mul_(1.5)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            factors.append(min(1.0, 0.1 / (float(norm) + 1e-6)))
            optimizer.step()
    dual = dualform.open(path, model)
    assert list(dual.store.manifest.inexact) == ["0"]
    updates = dual.store.updates
    for number, factor in enumerate(factors):
        found = updates.filter(pl.col("step") == number)["factors"].explode().to_list()
        assert found == pytest.approx([factor] * 4, rel=1e-5), number
        residuals = updates.filter(pl.col("step") == number)["residual"].to_list()
        assert max(residuals) < 1e-4


def _other_dictionary(optimizer, parameter):
    optimizer.state[parameter] = {"momentum_buffer": optimizer.state[parameter]["momentum_buffer"].clone()}


def _other_tensor(optimizer, parameter):
    optimizer.state[parameter]["momentum_buffer"] = optimizer.state[parameter]["momentum_buffer"].clone()


def _other_numbers(optimizer, parameter):
    optimizer.state[parameter]["momentum_buffer"].mul_(2)


def _another_state(optimizer, parameter):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("change", [_other_dictionary, _other_tensor, _other_numbers, _another_state])
def test_another_optimizer_state_between_steps_is_told(path, change):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with (
        pytest.raises(UnexplainedError, match="optimizer state replaced since the last step"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        train(model, optimizer, recorder, batches(4))
        change(optimizer, model[2].weight)
        train(model, optimizer, recorder, batches(1))
