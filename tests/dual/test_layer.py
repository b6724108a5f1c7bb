import numpy as np
import pytest
import torch

import dualform
from reference import attention as reference
from training import samples, train

INPUTS, _ = samples()


def query_of(trained, layer):
    """What reaches a layer of the trained model."""
    return INPUTS if layer == "0" else trained.model[:2](INPUTS).detach()


@pytest.mark.parametrize("name", ["0", "2"])
def test_it_equals_the_primal_layer(trained, name):
    queries = query_of(trained, name)
    primal = trained.model[int(name)](queries).detach()
    torch.testing.assert_close(trained.dual.layer(name)(queries), primal, rtol=0, atol=1e-14)


def test_attention_weights_by_a_double_loop(trained):
    layer = trained.dual.layer("2")
    queries = query_of(trained, "2")
    expected = reference.attention_weights(layer.keys.tolist(), queries.tolist())
    np.testing.assert_allclose(layer.attention_weights(queries).numpy(), expected, rtol=0, atol=1e-14)


def test_attention_by_a_plain_loop(trained):
    layer = trained.dual.layer("2")
    for query in query_of(trained, "2"):
        expected = reference.attention(layer.keys.tolist(), layer.values.tolist(), query.tolist())
        np.testing.assert_allclose(layer.attention(query).numpy(), expected, rtol=0, atol=1e-14)


def test_keys_values_and_initial_weight_make_the_weight(trained):
    layer = trained.dual.layer("0")
    learned = reference.sum_of_outer_products(layer.values.tolist(), layer.keys.tolist())
    np.testing.assert_allclose(
        layer.initial_weight.numpy() + learned, trained.model[0].weight.detach().numpy(), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(layer.bias, trained.model[0].bias.detach(), rtol=0, atol=1e-14)


def test_shapes(dual):
    layer = dual.layer("2")
    assert layer.keys.shape == (30, 7)
    assert layer.values.shape == (30, 4)
    assert layer.initial_weight.shape == (4, 7)
    assert layer.attention_weights(torch.zeros(7)).shape == (30,)
    assert layer.attention_weights(torch.zeros(2, 3, 7)).shape == (2, 3, 30)
    assert layer(torch.zeros(2, 3, 7)).shape == (2, 3, 4)
    assert layer.slots == 30
    assert "30 slots" in repr(layer)


def test_earlier_it_had_fewer_slots(trained):
    layer = trained.dual.at(2).layer("0")
    assert layer.keys.shape == (10, 5)
    before = trained.checkpoints[2]
    expected = INPUTS @ before["0.weight"].T + before["0.bias"]
    torch.testing.assert_close(layer(INPUTS), expected, rtol=0, atol=1e-14)


def test_before_the_first_step_it_is_the_initialisation(trained):
    layer = trained.dual.at(0).layer("0")
    assert layer.slots == 0
    assert layer.keys.shape == (0, 5)
    assert layer.values.shape == (0, 7)
    assert layer.attention_weights(INPUTS).shape == (12, 0)
    assert torch.equal(layer.initial_weight, trained.checkpoints[0]["0.weight"])


def test_without_a_bias(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4, bias=False).double()
    run = train(tmp_path / "run", model=model)
    layer = run.dual.layer("")
    assert layer.bias is None
    torch.testing.assert_close(layer(INPUTS), model(INPUTS).detach(), rtol=0, atol=1e-14)


def test_in_float32_it_is_as_good_as_training(tmp_path):
    run = train(tmp_path / "run", precision=torch.float32, dtype="float32")
    queries = INPUTS.float()
    layer = run.dual.layer("0")
    assert layer.keys.dtype == torch.float32
    torch.testing.assert_close(layer(queries), run.model[0](queries).detach(), rtol=1e-5, atol=1e-6)


def test_no_model_is_needed(trained):
    layer = dualform.open(trained.path).layer("0")
    torch.testing.assert_close(layer(INPUTS), trained.model[0](INPUTS).detach(), rtol=0, atol=1e-14)


def test_an_unknown_layer(dual):
    with pytest.raises(dualform.errors.UnknownLayerError, match=r"'4' was not recorded. Recorded layers: '0', '2'"):
        dual.layer("4")


@pytest.mark.parametrize("slots", [[], [7], [29, 0, 7, 7]])
def test_some_slots_are_those_of_all(trained, slots):
    layer = trained.dual.layer("2")
    keys, values = layer.take(slots)
    torch.testing.assert_close(keys, layer.keys[slots], rtol=0, atol=0)
    torch.testing.assert_close(values, layer.values[slots], rtol=0, atol=0)


def test_some_slots_of_feature_maps(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.batch(sample_id=[1, 2])
            optimizer.zero_grad()
            model(torch.randn(2, 2, 6)).sum().backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    layer, slots = dual.layer("0"), [0, 5, 13, 23]
    keys, values = layer.take(slots)
    torch.testing.assert_close(keys, layer.keys[slots], rtol=0, atol=0)
    torch.testing.assert_close(values, layer.values[slots], rtol=0, atol=0)
    addresses = dual.slots("0")
    assert addresses["row"].to_list() == [row for row in range(6) for _ in range(4)]
    assert addresses["position"].to_list() == [0, 1, 2, 3] * 6
    assert addresses["step"].to_list() == [step for step in range(3) for _ in range(8)]
