import numpy as np
import pytest
import torch
from torch.nn import functional as F

import dualform
from dualform.dual.coefficients import updates_of, walked
from dualform.dual.weights import rebuilt
from dualform.store import slots
from reference import attention as reference
from reference import sgd as reference_sgd
from training import network, samples, train

INPUTS, LABELS = samples()


def every(chunk):
    return np.ones(chunk.slots, dtype=bool)


def none(chunk):
    return np.zeros(chunk.slots, dtype=bool)


def test_against_sgd_step_by_step_on_the_gradients_of_the_slots(trained):
    """From the stored slots alone, by the plain loops: Σ error ⊗ key, then SGD as documented."""
    store = trained.dual.store
    settings = {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0,
        "weight_decay": 0.01,
        "nesterov": False,
        "maximize": False,
    }
    for _, layer in (store.layer(name) for name in trained.dual.layers):
        keys = torch.cat([chunk.keys(torch.float64).vectors() for chunk in store.chunks(layer.name)]).numpy()
        errors = torch.cat([chunk.errors(torch.float64) for chunk in store.chunks(layer.name)]).numpy()
        gradients = [
            reference.sum_of_outer_products(errors[low : low + 5], keys[low : low + 5]) for low in range(0, 30, 5)
        ]
        start = trained.checkpoints[0][f"{layer.name}.weight"].numpy()
        expected, _ = reference_sgd.run(start, gradients, [settings] * 6)
        found = rebuilt(store, f"{layer.name}.weight", begin=0, end=6)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-14)
        np.testing.assert_allclose(
            trained.model.state_dict()[f"{layer.name}.weight"].numpy(), expected, rtol=0, atol=1e-14
        )


def rebuilt_layer(store, layer, **settings):
    return {name: rebuilt(store, name, **settings) for name in layer.parameters}


@pytest.mark.parametrize("end", range(7))
def test_every_moment_of_training(trained, end):
    store = trained.dual.store
    for layer in store.manifest.layers:
        for name, found in rebuilt_layer(store, layer, begin=0, end=end).items():
            torch.testing.assert_close(found, trained.checkpoints[end][name], rtol=0, atol=1e-14)


def test_with_every_slot_kept_nothing_changes(trained):
    store = trained.dual.store
    for layer in store.manifest.layers:
        plain, kept = (rebuilt_layer(store, layer, begin=0, end=6, keep=keep) for keep in (None, every))
        assert all(torch.equal(plain[name], kept[name]) for name in plain)


def test_with_no_slot_kept_the_initial_part_is_left(trained):
    store = trained.dual.store
    _, layer = store.layer("2")
    a = walked(updates_of(store, "2.weight")).walked.a
    assert 0 < a < 1
    start = trained.checkpoints[0]
    torch.testing.assert_close(rebuilt(store, f"{layer.name}.weight", begin=0, end=6, keep=none), a * start["2.weight"])
    torch.testing.assert_close(
        rebuilt(store, f"{layer.name}.bias", begin=0, end=6, keep=none), a * start["2.bias"], rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("piece_bytes", [1, 500])
def test_decoding_in_pieces_changes_nothing(trained, monkeypatch, piece_bytes):
    store = trained.dual.store
    _, layer = store.layer("0")
    whole = rebuilt(store, f"{layer.name}.weight", begin=0, end=6)
    monkeypatch.setattr(slots, "PIECE_BYTES", piece_bytes)
    torch.testing.assert_close(rebuilt(store, f"{layer.name}.weight", begin=0, end=6), whole, rtol=0, atol=1e-15)


def test_from_a_snapshot_in_the_middle(with_snapshots):
    run, store = with_snapshots, with_snapshots.dual.store
    snapshots = store.snapshot_steps()
    assert len(snapshots) > 2
    begin = snapshots[1]
    for end in (begin, begin + 1, begin + 2, 24):
        for layer in store.manifest.layers:
            for name, found in rebuilt_layer(store, layer, begin=begin, end=end).items():
                torch.testing.assert_close(found, run.checkpoints[end][name], rtol=0, atol=1e-13)


def test_a_momentum_buffer_from_before_is_part_of_the_initial_part(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(INPUTS), LABELS).backward()
    optimizer.step()
    start, buffer = model[2].weight.detach().clone(), optimizer.state[model[2].weight]["momentum_buffer"].clone()
    run = train(tmp_path / "run", model=model, optimizer=optimizer, steps=2)
    expected = start - 0.1 * (0.9 + 0.9**2) * buffer
    torch.testing.assert_close(run.dual.layer("2").initial_weight, expected, rtol=0, atol=1e-15)


def test_keys_alone_have_no_coefficients(tmp_path):
    run = train(tmp_path / "run", keep="keys", steps=1)
    with pytest.raises(dualform.errors.NotRecordedError, match=r'keeps keys only.*keep="slots"'):
        walked(updates_of(run.dual.store, "0.weight"))


def test_memory_is_given_back_as_it_was_decoded(trained, monkeypatch):
    """Of each layer its own vectors count, not the file of all layers; a bias decodes error signals alone."""
    store = trained.dual.store
    decoded = []
    monkeypatch.setattr(type(store), "decoded", lambda _, nbytes: decoded.append(nbytes))
    for name in trained.dual.layers:
        _, layer = store.layer(name)
        # Of a weight the slots that are kept are decoded, of a bias those that are left out
        for parameter, keep, per_slot in (
            (f"{name}.weight", every, layer.d_in + layer.d_out),
            (f"{name}.bias", none, layer.d_out),
        ):
            decoded.clear()
            rebuilt(store, parameter, begin=0, end=6, keep=keep)
            assert sum(decoded) == store.slots(name) * per_slot * 8, parameter
