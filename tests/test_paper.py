"""Irie, Csordás, Schmidhuber (2022), sections 2 and 3: what the paper states, on a training that was recorded.

The paper writes keys and values as columns, K (d_in, T) and V (d_out, T); a dual layer has them as rows.
"""

import pytest
import torch

from training import samples, train

TIGHT = {"rtol": 0, "atol": 1e-13}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Plain gradient descent with a changing learning rate, as in the paper's footnote 3."""
    return train(
        tmp_path_factory.mktemp("paper") / "run",
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
    )


@pytest.fixture(params=["0", "2"])
def name(request):
    return request.param


@pytest.fixture
def layer(run, name):
    return run.dual.layer(name)


@pytest.fixture
def primal(run, name):
    """The primal form, S1: the trained layer itself, without its bias."""
    W = run.model[int(name)].weight.detach()
    return lambda x: W @ x


@pytest.fixture
def xs(run, name):
    """Test inputs of the layer."""
    inputs, _ = samples()
    inputs = inputs.flip(1)  # none of them was trained on
    return inputs if name == "0" else run.model[:2](inputs).detach()


def attention(K, V, q):
    """Definition 2.1: Attention(K, V, q) = Σ_t α_t v_t with α_t = k_t · q."""
    T = K.shape[1]
    alpha = [K[:, t] @ q for t in range(T)]
    return sum(alpha[t] * V[:, t] for t in range(T))


def test_definition_2_1_unnormalised_dot_attention(layer, xs):
    K, V = layer.keys.T, layer.values.T
    for q in xs:
        alpha = layer.attention_weights(q)
        for t in range(layer.slots):
            torch.testing.assert_close(alpha[t], K[:, t] @ q, **TIGHT)
        torch.testing.assert_close(layer.attention(q), attention(K, V, q), **TIGHT)


def test_lemma_2_2_attention_is_values_times_keys_transposed_times_query(layer, xs):
    K, V = layer.keys.T, layer.values.T
    for q in xs:
        torch.testing.assert_close(layer.attention(q), V @ K.T @ q, **TIGHT)


def test_equation_5_the_sum_of_outer_products_is_values_times_keys_transposed(layer):
    K, V = layer.keys.T, layer.values.T
    total = sum(torch.outer(V[:, t], K[:, t]) for t in range(layer.slots))
    torch.testing.assert_close(total, V @ K.T, **TIGHT)


def test_remark_2_3_the_attention_is_not_normalised(layer, xs):
    K, V = layer.keys.T, layer.values.T
    softmax = V @ torch.softmax(K.T @ xs[0], dim=0)
    assert not torch.allclose(layer.attention(xs[0]), softmax)
    torch.testing.assert_close(layer.attention(3 * xs[0]), 3 * layer.attention(xs[0]), **TIGHT)


def test_proposition_1_attention_and_linear_layer_are_dual(layer, xs):
    """S1: W = Σ v_t ⊗ k_t, S1(x) = W x. S2: S2(x) = Attention(K, V, x). Equivalent (definition 2.4): equal for all x."""
    K, V = layer.keys.T, layer.values.T
    W = sum(torch.outer(V[:, t], K[:, t]) for t in range(layer.slots))
    for x in xs:
        torch.testing.assert_close(W @ x, layer.attention(x), **TIGHT)


def test_corollary_1_equation_11_the_weight_is_its_start_and_what_every_pattern_wrote(run, name, layer):
    X, E, W0 = layer.keys.T, layer.values.T, layer.initial_weight
    W = W0 + sum(torch.outer(E[:, t], X[:, t]) for t in range(layer.slots))
    torch.testing.assert_close(W, run.model[int(name)].weight.detach(), **TIGHT)
    torch.testing.assert_close(W0, run.checkpoints[0][f"{name}.weight"], **TIGHT)  # no decay: W_0 as it was


def test_corollary_1_the_dual_form_of_a_layer_trained_by_gradient_descent(layer, primal, xs):
    W0 = layer.initial_weight
    for x in xs:
        dual = W0 @ x + layer.attention(x)  # equation 13
        torch.testing.assert_close(dual, primal(x), **TIGHT)  # equation 12


def test_definition_2_4_the_two_systems_are_equivalent(run, name, layer, xs):
    """With the bias, which has slots of its own: dual.layer(name) is the layer."""
    generator = torch.Generator().manual_seed(0)
    for x in [*xs, *torch.randn(20, xs.shape[1], generator=generator, dtype=torch.float64)]:
        torch.testing.assert_close(layer(x), run.model[int(name)](x).detach(), **TIGHT)


def test_footnote_3_a_value_is_minus_the_learning_rate_times_the_error_signal(run, name, layer):
    errors = torch.cat([chunk.errors(torch.float64) for chunk in run.dual.store.chunks(name)])
    torch.testing.assert_close(layer.values, -0.2 * errors, **TIGHT)


def test_remark_3_1_nothing_is_forgotten(run, name, layer):
    """Every pattern of every step is in the memory, as it was."""
    inputs, _ = samples()
    assert layer.slots == sum(len(ids) for ids in run.ids)
    expected = []
    for ids, weights in zip(run.ids, run.checkpoints, strict=False):
        x = inputs[ids]
        expected.append(x if name == "0" else torch.tanh(x @ weights["0.weight"].T + weights["0.bias"]))
    torch.testing.assert_close(layer.keys, torch.cat(expected), **TIGHT)


def test_remark_3_1_the_order_of_the_memory_does_not_matter(layer, xs):
    order = torch.randperm(layer.slots, generator=torch.Generator().manual_seed(1))
    X, E = layer.keys.T[:, order], layer.values.T[:, order]
    for x in xs:
        torch.testing.assert_close(attention(X, E, x), layer.attention(x), **TIGHT)


def test_remark_3_3_an_input_orthogonal_to_all_patterns_sees_only_the_start(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4)).double()
    run = train(tmp_path / "run", model=model, steps=1, rows=3)
    keys = run.dual.layer("0").keys
    x = torch.linalg.svd(keys).Vh[-1]  # three patterns in five dimensions leave room for this one
    assert (keys @ x).abs().max() < 1e-14
    layer = run.dual.layer("0")
    torch.testing.assert_close(layer.attention(x), torch.zeros(4, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(layer(x) - layer.bias, layer.initial_weight @ x, **TIGHT)
