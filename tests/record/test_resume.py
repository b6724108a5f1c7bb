"""Resume compares model and optimizer with what the recording knows of them, both ways."""

import copy

import pytest
import torch
from torch.nn import functional as F

import dualform
from dualform.errors import RecordingError
from lion import Lion
from training import SAMPLES, network, samples

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Lion": lambda p: Lion(p, lr=0.003),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}
ELEMENTWISE = [name for name in OPTIMIZERS if not name.startswith("SGD")]
INPUTS, LABELS = samples(torch.float32)


def train(model, optimizer, recorder, steps=1):
    for _ in range(steps):
        recorder.batch(sample_id=range(SAMPLES), label=LABELS)
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS), LABELS).backward()
        optimizer.step()


def sealed(path, name="Adam", **settings):
    """Three recorded steps, a seal() with a checkpoint beside it, and two steps more."""
    model = network(torch.float32)
    optimizer = OPTIMIZERS[name](model.parameters())
    with dualform.record(model, optimizer, path, **settings) as recorder:
        train(model, optimizer, recorder, 3)
        assert recorder.seal() == 3
        checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if settings.get("keep") != "totals":
            train(model, optimizer, recorder, 2)
    return checkpoint


def loaded(checkpoint, name="Adam", *, state=True):
    """Model and optimizer of a checkpoint. state: whether the optimizer's is loaded."""
    model = network(torch.float32, seed=5)
    model.load_state_dict(checkpoint["model"])
    optimizer = OPTIMIZERS[name](model.parameters())
    if state:
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"keep": "totals", "totals": ["label"]}], ids=["slots", "totals"])
def test_the_checkpoint_beside_a_seal_is_accepted(tmp_path, name, settings):
    checkpoint = sealed(tmp_path / "run", name, **settings)
    model, optimizer = loaded(checkpoint, name)
    with dualform.record(model, optimizer, tmp_path / "run", resume=3, **settings) as recorder:
        train(model, optimizer, recorder, 3)
    certificate = dualform.open(tmp_path / "run", model).verify()
    assert certificate.step == 6
    assert certificate.passed, str(certificate)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("settings", [{}, {"keep": "totals", "totals": ["label"]}], ids=["slots", "totals"])
def test_a_new_optimizer_is_refused_with_the_cure(tmp_path, name, settings):
    checkpoint = sealed(tmp_path / "run", name, **settings)
    model, optimizer = loaded(checkpoint, name, state=False)
    # Adagrad makes its state when it is made itself; it differs in its counter
    with pytest.raises(RecordingError, match=r"resume: the optimizer.*recorder\.seal\(\).*load_state_dict"):
        dualform.record(model, optimizer, tmp_path / "run", resume=3, **settings)
    model, optimizer = loaded(checkpoint, name)  # nothing was changed, and the folder is free
    dualform.record(model, optimizer, tmp_path / "run", resume=3, **settings).close()


def test_a_new_optimizer_is_refused_between_seals(tmp_path):
    checkpoint = sealed(tmp_path / "run")
    model, optimizer = loaded(checkpoint)
    with dualform.record(model, optimizer, tmp_path / "other") as recorder:
        train(model, optimizer, recorder)
    fresh = OPTIMIZERS["Adam"](model.parameters())
    with pytest.raises(RecordingError, match=r"no exp_avg, exp_avg_sq.* after step 4 .*load_state_dict"):
        dualform.record(model, fresh, tmp_path / "run", resume=4)
    with dualform.record(model, optimizer, tmp_path / "run", resume=4) as recorder:
        train(model, optimizer, recorder)
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_a_new_sgd_begins_afresh_with_a_warning_and_is_exact(tmp_path):
    model, optimizer = loaded(sealed(tmp_path / "run", "SGD"), "SGD", state=False)
    with pytest.warns(UserWarning, match=r"no momentum.*after step 3.*afresh.*load_state_dict"):
        recorder = dualform.record(model, optimizer, tmp_path / "run", resume=3)
    with recorder:
        train(model, optimizer, recorder, 2)
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_momentum_of_some_parameters_only_is_refused(tmp_path):
    model, optimizer = loaded(sealed(tmp_path / "run", "SGD"), "SGD")
    del optimizer.state[model[0].weight]["momentum_buffer"]
    with pytest.raises(RecordingError, match=r"no momentum_buffer for '0\.weight', and has one for '0\.bias'"):
        dualform.record(model, optimizer, tmp_path / "run", resume=3)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_state_that_the_recording_did_not_have_is_refused(tmp_path, name):
    checkpoint = sealed(tmp_path / "run", name)
    model = network(torch.float32)  # as it was before the first step
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    with pytest.raises(RecordingError, match=r"has (momentum_buffer|exp_avg).* did not have after step 0"):
        dualform.record(model, optimizer, tmp_path / "run", resume=0)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam", "Adagrad", "Adamax"])
@pytest.mark.parametrize("settings", [{}, {"keep": "totals", "totals": ["label"]}], ids=["slots", "totals"])
def test_another_count_of_updates_is_refused(tmp_path, name, settings):
    model, optimizer = loaded(sealed(tmp_path / "run", name, **settings), name)
    optimizer.state[model[2].weight]["step"] += 1
    with pytest.raises(RecordingError, match=r"optimizer's step of '2\.weight' is 4, and 3 after step 3"):
        dualform.record(model, optimizer, tmp_path / "run", resume=3, **settings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_numbers_in_the_state_are_refused(tmp_path, name):
    model, optimizer = loaded(sealed(tmp_path / "run", name), name)
    state = optimizer.state[model[2].bias]
    last = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()][-1]
    last[-1] += 1e-3
    with pytest.raises(RecordingError, match=r"the optimizer's \w+ of '2\.bias' is not what it was after step 3"):
        dualform.record(model, optimizer, tmp_path / "run", resume=3)


def test_rounding_of_the_type_passes(tmp_path):
    model, optimizer = loaded(sealed(tmp_path / "run"))
    for state in optimizer.state.values():
        state["exp_avg"].copy_(torch.nextafter(state["exp_avg"], torch.tensor(torch.inf)))
    dualform.record(model, optimizer, tmp_path / "run", resume=3).close()


def test_a_single_other_weight_is_refused(tmp_path):
    """A change that cancels in a random projection would pass there."""
    model, optimizer = loaded(sealed(tmp_path / "run"))
    with torch.no_grad():
        model[0].weight[3, 1] += 1e-5
    with pytest.raises(RecordingError, match=r"'0\.weight' is not what the recording .* after step 3"):
        dualform.record(model, optimizer, tmp_path / "run", resume=3)


def test_another_kind_of_optimizer_is_refused(tmp_path):
    model, optimizer = loaded(sealed(tmp_path / "run"), "SGD", state=False)
    with pytest.raises(RecordingError, match=r"trained by .* kind 'adam'.* kind 'sgd'.*another folder"):
        dualform.record(model, optimizer, tmp_path / "run", resume=3)


def test_adamw_may_follow_adam(tmp_path):
    """Both have the same state, and whether decay is decoupled is written down for each update."""
    model, optimizer = loaded(sealed(tmp_path / "run"), "AdamW")
    with dualform.record(model, optimizer, tmp_path / "run", resume=3) as recorder:
        train(model, optimizer, recorder, 2)
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_keys_alone_go_on_with_any_optimizer(tmp_path):
    model, optimizer = loaded(sealed(tmp_path / "run", keep="keys"), "RMSprop", state=False)
    with dualform.record(model, optimizer, tmp_path / "run", resume=3, keep="keys") as recorder:
        train(model, optimizer, recorder)
    assert dualform.open(tmp_path / "run").end_step == 4


def test_a_frozen_layer_has_no_state_to_compare(tmp_path):
    model = network(torch.float32)
    model[2].requires_grad_(False)
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        train(model, optimizer, recorder, 3)
    model[2].requires_grad_(True)
    with dualform.record(model, optimizer, tmp_path / "run", resume=True) as recorder:
        train(model, optimizer, recorder, 3)
    assert dualform.open(tmp_path / "run", model).verify().passed


def one_step_more(checkpoint, name, folder):
    """Model and optimizer one step after a checkpoint."""
    model, optimizer = loaded(checkpoint, name)
    with dualform.record(model, optimizer, folder) as recorder:
        train(model, optimizer, recorder)
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_right_state_is_accepted_between_seals(tmp_path, name):
    checkpoint = sealed(tmp_path / "run", name)
    model, optimizer = one_step_more(checkpoint, name, tmp_path / "other")
    with dualform.record(model, optimizer, tmp_path / "run", resume=4) as recorder:
        train(model, optimizer, recorder)
    assert dualform.open(tmp_path / "run", model).verify().passed


@pytest.mark.parametrize("name", ["SGD", "SGD Nesterov", "RMSprop", "Adadelta"])
def test_the_state_of_another_step_is_refused_between_seals(tmp_path, name):
    checkpoint = sealed(tmp_path / "run", name)
    model, optimizer = one_step_more(checkpoint, name, tmp_path / "other")
    optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
    with pytest.raises(
        RecordingError, match=r"the optimizer's (momentum_buffer|step) of .* after step 4 .*load_state_dict"
    ):
        dualform.record(model, optimizer, tmp_path / "run", resume=4)


def test_a_new_sgd_begins_afresh_with_a_warning_between_seals(tmp_path):
    checkpoint = sealed(tmp_path / "run", "SGD")
    model, _ = one_step_more(checkpoint, "SGD", tmp_path / "other")
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with pytest.warns(UserWarning, match=r"no momentum.*after step 4.*afresh.*load_state_dict"):
        recorder = dualform.record(model, optimizer, tmp_path / "run", resume=4)
    with recorder:
        train(model, optimizer, recorder, 2)
    assert dualform.open(tmp_path / "run", model).verify().passed
