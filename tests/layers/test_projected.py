"""keep="projected": slots through random matrices, against plain products with the same matrices."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dualform.layers.keys import OneHot, Patches, Vectors
from dualform.layers.layer import Geometry, Layer, Use
from dualform.layers.projected import SlotViews, frame, layer_seed, project_queries, projected_layer

SIZE = 3


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(d_in, d_out):
    return Layer("map", "linear", d_in, d_out, (Use("weight", "weight"), Use("bias", "bias")))


def test_a_frame_is_orthonormal_and_always_the_same():
    found = frame(7, 3, seed=5)
    np.testing.assert_allclose(found.T @ found, np.eye(3) * 7 / 3, atol=1e-14)
    # Stores hold seeds and no matrices: these numbers must never change
    np.testing.assert_allclose(found[0], [0.3330033356, -0.1583513657, 0.9047843076], atol=1e-9)
    assert layer_seed(12345, "encoder.0") == 1563183066
    assert not np.allclose(found, frame(7, 3, seed=6))


def test_a_frame_is_the_identity_on_average():
    draws = 4000
    mean = sum(f @ f.T for f in (frame(6, 2, seed=seed) for seed in range(draws))) / draws
    assert np.abs(mean - np.eye(6)).max() < 5 * 3 / math.sqrt(draws)


@pytest.mark.parametrize(("d_in", "d_out"), [(2, 3), (3, 3)])
def test_a_layer_with_short_sides_stays_as_it_is(d_in, d_out):
    layer = linear(d_in, d_out)
    assert projected_layer(layer, SIZE, 1) is layer


@pytest.mark.parametrize(("d_in", "d_out"), [(7, 5), (7, 2), (2, 5)])
def test_vectors(d_in, d_out):
    layer = linear(d_in, d_out)
    stored = projected_layer(layer, SIZE, 1)
    assert (stored.d_in, stored.d_out, stored.in_network) == (min(SIZE, d_in), min(SIZE, d_out), layer)
    views = SlotViews.of(stored)
    keys = drawn(4, d_in)
    errors = drawn(4, d_out, seed=1)
    p_in = matrix(views.of_keys[()])
    p_out = matrix(views.of_errors[()])
    torch.testing.assert_close(views.keys(Vectors(keys)), keys @ p_in)
    torch.testing.assert_close(views.errors(errors), errors @ p_out)


def test_numbers_are_rows_of_the_matrix():
    layer = Layer("map", "embedding", 9, 5, (Use("weight", "table"),), form="numbers")
    stored = projected_layer(layer, SIZE, 1)
    assert (stored.form, stored.uses[0].role) == ("vectors", "weight")
    views = SlotViews.of(stored)
    p_in = matrix(views.of_keys[()])
    found = views.keys(OneHot(torch.tensor([8, 0, -1]), 9, torch.float64))
    torch.testing.assert_close(found, torch.stack([p_in[8], p_in[0], torch.zeros(SIZE, dtype=torch.float64)]))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("d_out", [2, 8])
def test_feature_maps(groups, d_out):
    geometry = Geometry(4, (2, 3), (1, 2), (1, 0, 1, 1), (1, 1), "zeros")
    uses = (Use("weight", "weight", groups=groups), Use("bias", "bias"))
    layer = Layer("map", "convolution", geometry.patch, d_out, uses, form="maps", geometry=geometry)
    stored = projected_layer(layer, SIZE, 1)
    assert (stored.form, stored.geometry) == ("vectors", None)
    views = SlotViews.of(stored)
    maps = drawn(1, 4, 5, 7)
    module = nn.Conv2d(4, d_out, (2, 3), stride=(1, 2), groups=groups, dtype=torch.float64)
    output = module(torch.nn.functional.pad(maps, (1, 1, 1, 0)))
    error_maps = drawn(*output.shape, seed=1)
    (output * error_maps).sum().backward()
    errors = error_maps.flatten(2)[0].T
    found = views.errors(errors).T @ views.keys(Patches(maps, geometry))
    gradient = module.weight.grad.flatten(1)
    expected = matrix(views.of_errors[()]).T @ gradient @ matrix(views.of_keys[()])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(views.errors(errors).sum(0), matrix(views.of_errors[()]).T @ module.bias.grad)


def test_weights_that_see_parts_of_the_slots_share_the_size():
    uses = (
        Use("of_input", "weight", keys=(0, 4), errors=(0, 6)),
        Use("of_state", "weight", keys=(4, 9), errors=(0, 2, 6, 10)),
        Use("bias_of_state", "bias", errors=(0, 2, 6, 10)),
    )
    layer = Layer("gru", "recurrent", 9, 10, uses)
    stored = projected_layer(layer, 4, 1)
    assert [use.keys for use in stored.uses] == [(0, 2), (2, 4), ()]
    assert [use.errors for use in stored.uses] == [(0, 2), (2, 4), (2, 4)]
    views = SlotViews.of(stored)
    errors = drawn(5, 10)
    own = errors[:, [0, 1, 6, 7, 8, 9]]
    torch.testing.assert_close(views.errors(errors)[:, 2:], own @ matrix(views.of_errors[(0, 2, 6, 10)]))


def test_queries_go_through_the_matrices_of_slots():
    layer = linear(7, 5)
    stored = projected_layer(layer, SIZE, 1)
    queries = drawn(2, 4, 7)
    slopes = drawn(2, 4, 5, seed=1)
    views = SlotViews.of(stored)
    found = project_queries(stored, queries, slopes)
    torch.testing.assert_close(found[0], queries @ matrix(views.of_keys[()]))
    torch.testing.assert_close(found[1], slopes @ matrix(views.of_errors[()]))
    assert project_queries(layer, queries, slopes) == (queries, slopes)


def matrix(view):
    if not view.is_random:
        return torch.eye(view.length, dtype=torch.float64)
    return torch.from_numpy(frame(view.length, view.size, view.seed))
