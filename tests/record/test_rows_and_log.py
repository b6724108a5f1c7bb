"""Columns of rows, the log of steps, and batches that were not announced."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import dualform
from dualform.errors import BatchError, RecordingError
from recorded_samples import INPUTS, LABELS, record, slot_frame
from training import SAMPLES, assert_exact, assert_same_weights, checkpoint, network, sgd, train


def test_columns_reach_their_slots(tmp_path, trained):
    slots = slot_frame(trained.dual, "0")
    ids = torch.cat(trained.ids)
    assert slots["sample_id"].to_list() == ids.tolist()
    assert slots["label"].to_list() == LABELS[ids].tolist()
    assert slots["task"].to_list() == ["early"] * 15 + ["late"] * 15
    assert slots["step"].to_list() == sorted(list(range(6)) * 5)
    assert torch.equal(trained.dual.layer("0").keys, INPUTS[ids])


def test_log_is_kept_beside_its_step(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for step in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(INPUTS), LABELS)
            loss.backward()
            recorder.log(before=step, loss=loss.item())  # of the coming step
            optimizer.step()
            if step != 1:
                recorder.log(after=10 * step)
    log = dualform.open(tmp_path / "run", model).log
    assert log["step"].to_list() == [0, 1, 2]
    assert log["before"].to_list() == [0.0, 1.0, 2.0]
    assert log["after"].to_list() == [0.0, None, 20.0]
    assert log["loss"].is_sorted(descending=True)


@pytest.mark.parametrize("made", [float, torch.tensor, np.float32, lambda x: torch.tensor(x, requires_grad=True)])
def test_log_takes_a_number_of_any_make(tmp_path, made):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        recorder.batch(sample_id=range(SAMPLES))
        F.cross_entropy(model(INPUTS), LABELS).backward()
        optimizer.step()
        recorder.log(loss=made(0.5))
    assert dualform.open(tmp_path / "run").log["loss"].to_list() == [0.5]


def test_no_batch_call(tmp_path):
    model = network()
    optimizer = sgd(model)
    before = checkpoint(model)
    with record(model, tmp_path / "run", optimizer):
        F.cross_entropy(model(INPUTS), LABELS).backward()
        with pytest.raises(BatchError, match=r"no recorder\.batch\(\) call.*recorder\.batch\(sample_id"):
            optimizer.step()
    assert_same_weights(model, before, atol=0)


def test_columns_without_a_name(tmp_path):
    model = network()
    with dualform.record(model, sgd(model), tmp_path / "run") as recorder:
        with pytest.raises(BatchError, match=r"by name: recorder\.batch\(sample_id=ids"):
            recorder.batch([1, 2, 3])
        assert "nothing is sealed yet" in repr(dualform.open(tmp_path / "run"))
    assert "sealed" not in repr(dualform.open(tmp_path / "run"))


def test_no_new_batch_call(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        recorder.batch(sample_id=range(SAMPLES))
        F.cross_entropy(model(INPUTS), LABELS).backward()
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS), LABELS).backward()
        with pytest.raises(BatchError, match=r"without a new recorder\.batch\(\) call"):
            optimizer.step()


def test_the_wrong_number_of_rows(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        recorder.batch(sample_id=range(SAMPLES - 1))
        F.cross_entropy(model(INPUTS), LABELS).backward()
        with pytest.raises(
            BatchError, match=r"announced 11 rows.*given tensors of shapes \(12, 5\).*one entry for each"
        ):
            optimizer.step()


def test_a_step_that_was_refused_is_not_in_the_store(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS), LABELS).backward()
            optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS), LABELS).backward()
        with pytest.raises(BatchError):
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.info()["steps"] == 3
    assert dual.layer("0").slots == dual.layer("2").slots == 3 * SAMPLES
    assert_exact(dual)


def test_an_error_in_the_loop_leaves_a_store_up_to_there(tmp_path):
    def fail(step):
        if step == 3:
            raise ZeroDivisionError("mine")

    model = network()
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(tmp_path / "run", model=model, after_step=fail)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.info()["steps"] == 4
    assert "ZeroDivisionError" in dual.info()["ended"]
    assert_exact(dual)


def test_a_closed_recorder_says_so(tmp_path):
    recorder = record(network(), tmp_path / "run")
    recorder.close()
    recorder.close()
    for call in (lambda: recorder.batch(sample_id=[1]), lambda: recorder.log(loss=1.0)):
        with pytest.raises(RecordingError, match=r"is closed. Record into a new folder"):
            call()


def test_training_goes_on_after_closing(tmp_path):
    run = train(tmp_path / "run", steps=2)
    optimizer = sgd(run.model)
    F.cross_entropy(run.model(INPUTS), LABELS).backward()
    optimizer.step()
    assert run.dual.info()["steps"] == 2


def test_a_recording_without_a_step(tmp_path):
    model = network()
    with record(model, tmp_path / "run"):
        pass
    dual = dualform.open(tmp_path / "run", model)
    assert dual.info()["steps"] == 0
    assert dual.verify().passed
    assert_same_weights(dual.at(0).model(), model.state_dict(), atol=0)
    assert dual.attend(INPUTS)["0"].top(3).height == 0


def test_a_model_that_is_no_module(tmp_path):
    with pytest.raises(RecordingError, match=r"'dict'.*expected the nn\.Module"):
        dualform.record({}, sgd(network()), tmp_path / "run")


def test_batch_axis_for_a_layer_that_is_not_recorded(tmp_path):
    with pytest.raises(RecordingError, match=r"batch_axis names 'head'.*Recorded layers: '0', '2'"):
        record(network(), tmp_path / "run", batch_axis={"head": 1})
