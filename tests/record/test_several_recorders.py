"""Several recorders at a time, of one model or of several."""

import pytest
import torch.nn.functional as F

import dualform
from plain_loops import assert_exact, batches, network, sgd

pytestmark = pytest.mark.usefixtures("precision")


def test_several_recorders_in_one_process(tmp_path):
    models = [network(4, 8, 2), network(4, 6, 2)]
    optimizers = [sgd(model) for model in models]
    recorders = [
        dualform.record(model, optimizer, tmp_path / str(number))
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    for ids, x, y in batches(4):
        for model, optimizer, recorder in zip(models, optimizers, recorders, strict=True):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    for number, recorder in enumerate(recorders):
        recorder.close()
        assert_exact(tmp_path / str(number), models[number])


def test_two_recorders_of_one_model(tmp_path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with (
        dualform.record(model, optimizer, tmp_path / "a", layers="0") as one,
        dualform.record(model, optimizer, tmp_path / "b", keep="keys") as other,
    ):
        for ids, x, y in batches(4):
            one.batch(sample_id=ids)
            other.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert_exact(tmp_path / "a", model)
    assert dualform.open(tmp_path / "b").store.slots("2") == 24
