"""Layers that keep every slot are verified as strictly, and judged as fairly, as if all layers did: keep={"0": "keys", "*": "slots"}."""

import pytest
import torch
import torch.nn.functional as F

import dualform
from training import network, samples, train

KEEPS = {"plain": "slots", "mixed": {"0": "keys", "*": "slots"}}


def verdicts(dual):
    return dict(dual.verify().frame.select("parameter", "verdict").iter_rows())


def train_several(folder, optimizer, steps=12):
    """One training under bfloat16 autocast, seen by a recorder for each of KEEPS."""
    model = network(torch.float32)
    inputs, labels = samples(torch.float32)
    made = optimizer(model)
    recorders = [dualform.record(model, made, folder / name, keep=keep) for name, keep in KEEPS.items()]
    for _ in range(steps):
        for recorder in recorders:
            recorder.batch(sample_id=range(len(inputs)))
        made.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        made.step()
    for recorder in recorders:
        recorder.close()
    return {name: dualform.open(folder / name) for name in KEEPS}


def test_the_rounding_of_autocast_is_no_failure(tmp_path):
    duals = train_several(tmp_path, lambda model: torch.optim.Adam(model.parameters(), 0.005))
    plain = verdicts(duals["plain"])
    mixed = verdicts(duals["mixed"])
    assert plain["2.weight"] == mixed["2.weight"] == "pass"
    assert mixed["0.weight"] == "gradients"


def test_an_optimizer_that_is_not_replayed(tmp_path):
    with pytest.warns(UserWarning, match="cannot be replayed"):
        run = train(
            tmp_path / "run", optimizer=lambda model: torch.optim.Rprop(model.parameters()), keep=KEEPS["mixed"]
        )
    assert set(verdicts(run.dual).values()) == {"gradients"}


def test_weights_that_are_not_stored_are_not_compared_with_themselves(tmp_path):
    dual = train(tmp_path / "run", keep=KEEPS["mixed"]).dual
    certificate = dual.at(3).verify()
    assert certificate.passed, certificate
    assert certificate.compared_with.startswith("projections of the weights")


def test_a_slot_that_was_changed_is_found(tmp_path):
    dual = train(
        tmp_path / "run", keep=KEEPS["mixed"], optimizer=lambda model: torch.optim.SGD(model.parameters(), 0)
    ).dual
    file = dual.store.chunk_file(0)
    for tensor in [name for name in file if name.endswith(".errors")]:
        file._checked[tensor] = 2 * file[tensor]
    assert verdicts(dual)["2.weight"] == "fail"
