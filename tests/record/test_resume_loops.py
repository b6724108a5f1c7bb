"""Trainings that go on after a stop, in another phase or from a checkpoint."""

import polars as pl
import pytest
import torch

import dualform
from dualform.errors import RecordingError
from plain_loops import assert_exact, batches, network, sgd, train
from training import assert_same_weights

pytestmark = pytest.mark.usefixtures("precision")


def test_two_phases_with_different_optimizers(path):
    model = network(4, 8, 2)
    stream = list(batches(8))
    first = sgd(model, momentum=0.9)
    with dualform.record(model, first, path) as recorder:
        train(model, first, recorder, stream[:4])
    second = sgd(model, lr=0.02, momentum=0.5, nesterov=True, weight_decay=0.01)
    with pytest.warns(UserWarning, match="begins afresh, as the optimizer of a second phase does"):
        recorder = dualform.record(model, second, path, resume=True)
    with recorder:
        assert recorder.step == 4
        train(model, second, recorder, stream[4:])
    certificate = assert_exact(path, model)
    assert certificate.step == 8


@pytest.mark.parametrize("at", [0, 2, 3, 6])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_resume_from_a_checkpoint(path, at, dtype):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    stream = list(batches(8))
    kept = {}
    with dualform.record(model, optimizer, path, chunk_bytes=3000, dtype=dtype) as recorder:
        for number, (ids, x, y) in enumerate(stream[:6]):
            kept[number] = {"model": {k: v.clone() for k, v in model.state_dict().items()}}
            kept[number]["optimizer"] = torch.utils._pytree.tree_map(
                lambda v: v.clone() if isinstance(v, torch.Tensor) else v, optimizer.state_dict()
            )
            train(model, optimizer, recorder, [(ids, x, y)])
    straight = network(4, 8, 2)
    of_straight = sgd(straight)
    with dualform.record(straight, of_straight, path.with_name("straight"), dtype=dtype) as recorder:
        train(straight, of_straight, recorder, stream)
    if at < 6:
        model.load_state_dict(kept[at]["model"])
        optimizer = sgd(model)
        optimizer.load_state_dict(kept[at]["optimizer"])
    with dualform.record(model, optimizer, path, resume=at, chunk_bytes=3000, dtype=dtype) as recorder:
        train(model, optimizer, recorder, stream[at:])
    assert dualform.open(path, model).verify().passed
    one, other = dualform.open(path, model), dualform.open(path.with_name("straight"), straight)
    assert one.end_step == other.end_step == 8
    assert one.rows.equals(other.rows)
    query = torch.randn(3, 4)
    for layer in ("0", "2"):
        mine, theirs = one.attend(query)[layer].top(48), other.attend(query)[layer].top(48)
        assert mine.drop("weight").equals(theirs.drop("weight"))
    assert one.store.key_count("0") == other.store.key_count("0")


@pytest.mark.parametrize("keep", ["slots", "totals"])
def test_resume_with_nothing_left_to_train_loses_no_layer(path, keep):
    """A script that is run again after its last step."""
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, keep=keep, totals=["sample_id"]) as recorder:
        train(model, optimizer, recorder, batches(4))
    expected = dualform.open(path, model).masked(drop=pl.col("sample_id") < 3)
    with dualform.record(model, optimizer, path, keep=keep, totals=["sample_id"], resume=True):
        pass
    dual = dualform.open(path, model)
    assert dual.layers == ["0", "2"]
    assert dual.info()["left_out"] == {}
    assert_same_weights(dual.masked(drop=pl.col("sample_id") < 3), expected.state_dict())


def test_resume_refuses_other_weights(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        train(model, optimizer, recorder, batches(4))
    with pytest.raises(RecordingError, match=r"'0.weight' is not what the recording .* after step 2"):
        dualform.record(model, optimizer, path, resume=2)
    with pytest.raises(RecordingError, match="sealed up to step 4"):
        dualform.record(model, optimizer, path, resume=5)
    other = network(4, 6, 2)
    with pytest.raises(RecordingError, match="other layers"):
        dualform.record(other, sgd(other), path, resume=True)
    assert dualform.open(path, model).verify().passed  # nothing was lost


def test_resume_refuses_another_optimizer_state_where_it_is_known(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        train(model, optimizer, recorder, batches(4))
    optimizer.state[model[0].weight]["momentum_buffer"].mul_(2)
    with pytest.raises(RecordingError, match="momentum_buffer"):
        dualform.record(model, optimizer, path, resume=True)
