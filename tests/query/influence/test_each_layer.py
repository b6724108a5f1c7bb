"""Every kind of layer: the kernel beside autograd's own gradients, the whitened path beside dense matrices of its slots."""

import math

import networks
import numpy as np
import pytest
import torch

from dualform.curvature.maps import linear_maps
from reference import influence as reference

SEGMENTS = [(0, 2), (2, 4)]
UNITS = [0, 2]
EXACT = {"rtol": 1e-7, "atol": 1e-10}


@pytest.fixture(scope="module", params=list(networks.NETWORKS))
def run(request, tmp_path_factory):
    found = networks.train(request.param, tmp_path_factory.mktemp(request.param) / "run")
    found.name = request.param
    return found


def everything(answer):
    return torch.cat([scores for _, scores in answer.scores()], 1).numpy()


def ask(run, **settings):
    asked = networks.inputs(run.name)[-2:]
    return run.dual.influence(asked, target=UNITS, segments=SEGMENTS, **settings)


def by_autograd(run, moments):
    """The kernel's scores with autograd's own gradients."""
    given = networks.inputs(run.name)
    return np.concatenate(
        [
            reference.kernel(run, given, networks.LABELS, segment, moment, given[-2:], UNITS)
            for segment, moment in zip(SEGMENTS, moments, strict=True)
        ],
        1,
    )


def test_the_kernel_is_that_of_autograds_gradients(run):
    found = ask(run, method="kernel")
    np.testing.assert_allclose(everything(found), by_autograd(run, found.moments), **EXACT)


def test_layers_and_slots_add_up_to_rows(run):
    for method in ("whitened", "sketch"):
        found = ask(run, method=method)
        total = 0
        for layer in found:
            frame = found[layer].total("sample_id")
            total = total + frame["total"].to_numpy()
        np.testing.assert_allclose(found.total("sample_id")["total"].to_numpy(), total, **EXACT)


def test_a_large_sketch_is_the_kernel(run):
    sketch, kernel = (everything(ask(run, method=method, size=100)) for method in ("sketch", "kernel"))
    np.testing.assert_allclose(sketch, kernel, **EXACT)


def test_whitened_is_the_dense_one_of_each_layers_slots(run):
    found = ask(run, silent=True)
    for name in found:
        expected = [dense(run, name, *both) for both in zip(SEGMENTS, found.moments, strict=True)]
        layer = found[name]
        slots = torch.cat([numbers for numbers, _ in layer.scores()])
        assert slots.tolist() == list(range(len(slots)))
        np.testing.assert_allclose(everything(layer), np.concatenate(expected, 1), **EXACT, err_msg=name)


def dense(run, name, segment, moment, damping=0.3):
    """S⁻¹ G A⁻¹ with G from autograd, A and S from the slots that wrote something; its inner product with each slot's
    error ⊗ (key, constant)."""
    store = run.dual.store
    _, layer = store.layer(name)
    keys, errors, rows = slots(store, name, segment)
    model = reference.at(run.model, run.checkpoints[moment])
    given = networks.inputs(run.name)[-2:]
    gradients = [
        reference.gradients(model, x, lambda y, u=unit: reference.margin(y[0], u))
        for x, unit in zip(given, UNITS, strict=True)
    ]
    found = np.zeros((len(given), len(errors)))
    wrote = errors.any(1)
    for of_query, of_slots in maps(layer, gradients, keys, errors):
        inner, outer = of_slots  # (slots, width), (slots, outputs)
        A = np.mean([np.outer(k, k) for k in inner[wrote]], 0)
        S = np.mean([np.outer(e, e) for e in outer[wrote]], 0)
        A = A + damping * np.trace(A) / len(A) * np.eye(len(A))
        S = S + damping * np.trace(S) / len(S) * np.eye(len(S))
        for q, G in enumerate(of_query):
            W = np.linalg.inv(S) @ G @ np.linalg.inv(A) / (wrote.sum() / rows)
            found[q] += [-(e @ W @ k) for k, e in zip(inner, outer, strict=True)]
    return found


def slots(store, name, segment):
    """All keys and error signals (times the batch) of a segment, and how many rows it has."""
    keys, errors = [], []
    for chunk in store.chunks(name, begin_step=segment[0], end_step=segment[1]):
        for low, high in chunk.pieces(1):
            here = chunk.per_slot(chunk.blocks[:, 0])[low:high] >= segment[0]
            keys.append(chunk.keys(torch.float64, low, high).vectors().numpy()[here])
            errors.append(chunk.errors(torch.float64, low, high).numpy()[here] * networks.ROWS)
    return np.concatenate(keys), np.concatenate(errors), networks.ROWS * (segment[1] - segment[0])


def maps(layer, gradients, keys, errors):
    """For each linear map of a layer: the matrix of each query, and (keys with their constant, error signals) of the slots."""
    ones = np.ones((len(errors), 1))
    parameters = [use.parameter for use in layer.uses]
    if layer.kind == "elementwise":
        weight, bias = parameters
        yield [g[weight][:, None] for g in gradients], (ones, keys * networks.ROWS)
        yield [g[bias][:, None] for g in gradients], (ones, errors)
    elif layer.kind == "embedding":
        yield [g[parameters[0]].T for g in gradients], (keys, errors)
    elif layer.kind == "recurrent":
        weight_ih, weight_hh, bias_ih, bias_hh = parameters
        width = len(gradients[0][weight_ih][0])
        hidden = len(gradients[0][weight_hh][0])
        if len(errors[0]) == 4 * hidden == len(gradients[0][bias_ih]) + hidden:  # a GRU
            of_hidden = np.concatenate([errors[:, : 2 * hidden], errors[:, 3 * hidden :]], 1)
            for weight, bias, inner, outer in (
                (weight_ih, bias_ih, keys[:, :width], errors[:, : 3 * hidden]),
                (weight_hh, bias_hh, keys[:, width:], of_hidden),
            ):
                of_query = [np.concatenate([g[weight], g[bias][:, None]], 1) for g in gradients]
                yield of_query, (np.concatenate([inner, ones], 1), outer)
            return
        # two biases with the same gradient: √2 of each
        of_query = [
            np.concatenate([g[weight_ih], g[weight_hh], math.sqrt(2) * g[bias_ih][:, None]], 1) for g in gradients
        ]
        yield of_query, (np.concatenate([keys, math.sqrt(2) * ones], 1), errors)
    else:
        weight = [g[parameters[0]] for g in gradients]
        bias = [g[parameters[1]] for g in gradients] if len(parameters) > 1 else None
        if layer.uses[0].rows:
            low, high = layer.uses[0].rows
            weight, bias = ([one[low:high] for one in some] for some in (weight, bias))
        groups, d_out, d_in = layer.uses[0].groups, layer.d_out, layer.d_in
        for g in range(groups):
            own, mine = (slice(g * n // groups, (g + 1) * n // groups) for n in (d_out, d_in))
            G = [one.reshape(d_out, -1)[own] for one in weight]
            inner = keys[:, mine]
            if bias is not None:
                G = [np.concatenate([one, b[own][:, None]], 1) for one, b in zip(G, bias, strict=True)]
                inner = np.concatenate([inner, ones], 1)
            yield G, (inner, errors[:, own])


def test_a_gru_is_two_maps_and_an_lstm_one(run):
    store = run.dual.store
    counts = {layer.name: len(linear_maps(layer)) for layer in store.manifest.layers}
    if run.name == "gru":
        assert counts["body"] == 2
    if run.name == "lstm":
        assert counts["body"] == 1


@pytest.mark.parametrize("name", ["convolutions", "lstm"])
def test_adam_runs_answer_too(name, tmp_path):
    run = networks.train(name, tmp_path / "run", adam=True)
    run.name = name
    found = ask(run, method="kernel")
    np.testing.assert_allclose(everything(found), by_autograd(run, found.moments), **EXACT)
    assert np.isfinite(everything(ask(run))).all()
