"""keep="rows": what is summed, against plain loops, and what batch() refuses."""

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dualform
from dualform.errors import BatchError, NotRecordedError, RecordingError
from dualform.layers.keys import RowGradients, keys_of
from dualform.layers.layer import Geometry, Layer, Use
from dualform.record.row_gradients import SlotsOfCall, columns_of_rows, summed
from training import network, train


def linear(d_in, d_out, *, bias):
    uses = [Use("weight", "weight")] + [Use("bias", "bias")] * bias
    return Layer("map", "linear", d_in, d_out, tuple(uses))


def convolution(channels, d_out, groups):
    geometry = Geometry(channels, (2, 3), (1, 2), (1, 0, 1, 1), (1, 1), "zeros")
    uses = (Use("weight", "weight", groups=groups), Use("bias", "bias"))
    return Layer("map", "convolution", geometry.patch, d_out, uses, form="maps", geometry=geometry)


def sums_of(layer, stored, errors, rows, silent=None, size=()):
    keys = keys_of(layer, stored, size, torch.float64)
    return summed(SlotsOfCall(layer, rows, stored, keys, errors, silent))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    rows=st.integers(1, 4),
    positions=st.integers(2, 9),
    d_in=st.integers(1, 5),
    d_out=st.integers(1, 5),
    bias=st.booleans(),
)
def test_a_row_is_the_sum_of_its_outer_products(rows, positions, d_in, d_out, bias):
    layer = linear(d_in, d_out, bias=bias)
    keys = drawn(rows * positions, d_in)
    errors = drawn(rows * positions, d_out, seed=1)
    found = sums_of(layer, keys, errors, rows)
    is_smaller = d_out * (d_in + bias) < positions * (d_in + d_out)
    assert (found is not None) == is_smaller
    if found is None:
        return
    assert (found.positions, found.known.positions, found.known.written) == (1, positions, rows * positions)
    gradients = RowGradients.of(layer, found.keys)
    for row in range(rows):
        expected = torch.zeros(d_out, d_in, dtype=torch.float64)
        expected_bias = torch.zeros(d_out, dtype=torch.float64)
        for position in range(row * positions, (row + 1) * positions):
            expected += torch.outer(errors[position], keys[position])
            expected_bias += errors[position]
        torch.testing.assert_close(gradients.added_to(layer.uses[0])[row], expected)
        if bias:
            torch.testing.assert_close(gradients.added_to(layer.uses[1])[row], expected_bias)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("maps_a_row", [1, 3])
def test_a_row_of_feature_maps_is_the_gradient_of_a_convolution(groups, maps_a_row):
    layer = convolution(4, 6, groups)
    rows = 3
    maps = drawn(rows * maps_a_row, 4, 5, 7)
    module = nn.Conv2d(4, 6, (2, 3), stride=(1, 2), groups=groups, dtype=torch.float64)
    padded = torch.nn.functional.pad(maps, (1, 1, 1, 0))
    errors = drawn(*module(padded).shape, seed=1)
    flat = maps.flatten(1)
    found = sums_of(layer, flat, errors.flatten(2).transpose(1, 2).reshape(-1, 6), rows, size=(5, 7))
    for row in range(rows):
        module.zero_grad()
        here = slice(row * maps_a_row, (row + 1) * maps_a_row)
        (module(padded[here]) * errors[here]).sum().backward()
        gradient = RowGradients.of(layer, found.keys)
        torch.testing.assert_close(gradient.added_to(layer.uses[0])[row], module.weight.grad.flatten(1))
        torch.testing.assert_close(gradient.added_to(layer.uses[1])[row], module.bias.grad)


@given(
    numbers=st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4), drop=st.booleans()
)
def test_a_row_has_one_slot_for_each_of_its_numbers(numbers, drop):
    layer = Layer("map", "embedding", 4, 3, (Use("weight", "table"),), form="numbers")
    places = torch.tensor(numbers)
    rows, positions = places.shape
    errors = drawn(rows * positions, 3)
    silent = None
    if drop:  # the first position of each row, as padding on the left
        errors[::positions] = 0
        silent = np.arange(rows * positions) % positions == 0
    flat = places.reshape(-1, 1)
    found = sums_of(layer, flat, errors, rows, silent)
    most = max(len(set(row)) for row in numbers)
    if most == positions:
        assert found is None
        return
    assert found.positions == most
    assert found.known.written == rows * (positions - drop)
    for row in range(rows):
        expected = torch.zeros(4, 3, dtype=torch.float64)
        written = set()
        for position in range(positions):
            expected[numbers[row][position]] += errors[row * positions + position]
            written |= {numbers[row][position]} if position or not drop else set()
        own = slice(row * most, (row + 1) * most)
        total = torch.zeros(4, 3, dtype=torch.float64).index_add_(0, found.keys[own, 0], found.errors[own])
        torch.testing.assert_close(total, expected)
        of_slots = np.zeros(most, np.bool_) if found.silent is None else found.silent[own]
        assert sorted(found.keys[own, 0][torch.from_numpy(~of_slots)].tolist()) == sorted(written)


def test_a_row_is_silent_if_all_its_positions_are():
    layer = linear(2, 2, bias=False)
    keys = drawn(12, 2)
    errors = drawn(12, 2, seed=1)
    silent = np.array([True] * 4 + [True, False, True, True] + [False] * 4)
    errors[torch.from_numpy(silent)] = 0
    found = sums_of(layer, keys, errors, 3, silent)
    assert found.silent.tolist() == [True, False, False]
    assert found.known.written == 5


def test_single_slots_and_no_slots_are_left_as_they_are():
    layer = linear(1, 1, bias=False)
    for rows, positions in ((3, 1), (0, 0), (2, 0)):
        keys = drawn(rows * positions, 1)
        assert sums_of(layer, keys, keys, rows) is None


# What batch() is given


def test_columns_that_are_constant_in_each_row_become_columns_of_rows():
    ids = torch.tensor([[3, 3], [1, 1]])
    found = columns_of_rows({"sample_id": ids, "label": [[1, 1], [2, 2]], "word": ["a", "b"], "epoch": 4})
    assert found["sample_id"].tolist() == [3, 1]
    assert found["label"].tolist() == [1, 2]
    assert (found["word"], found["epoch"]) == (["a", "b"], 4)


def test_columns_that_differ_within_a_row_are_refused(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", keep="rows") as recorder:
        with pytest.raises(BatchError, match=r"'sample_id' has an entry for each position.*keep=\"slots\""):
            recorder.batch(sample_id=torch.tensor([[3, 3], [1, 2]]))
        recorder.batch(sample_id=torch.tensor([[3, 3], [1, 1]]))
        model(torch.randn(2, 3, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.rows["sample_id"].to_list() == [3, 1]
    assert dual.verify().passed


# What is stored


def test_one_position_a_row_is_stored_as_slots_byte_for_byte(tmp_path):
    stores = {}
    for keep in ("slots", "rows"):
        run = train(tmp_path / keep, keep=keep, steps=3)
        stores[keep] = run.dual.store
    for place in range(len(stores["slots"].manifest.chunks)):
        of_slots, of_rows = (store.chunk_file(place) for store in stores.values())
        assert list(of_slots) == list(of_rows)
        for name in of_slots:
            assert of_slots[name].numpy().tobytes() == of_rows[name].numpy().tobytes(), name
    assert not stores["rows"].is_summed("0")
    run.dual.attend(torch.randn(2, 5, dtype=torch.float64))["0"].top(
        1
    )  # nothing was summed: single slots can be asked for


def test_totals_beside_are_deltas_and_key_sums_are_refused(tmp_path):
    run = train(tmp_path / "run", keep="rows", totals=["label"])
    assert [grouping.kind for grouping in run.dual.store.manifest.totals.groupings] == ["deltas"]
    with pytest.raises(RecordingError, match="keeps the gradients of rows, and no keys to sum"):
        train(tmp_path / "other", keep="rows", totals={"label": "keys"})


def test_the_message_says_what_to_record_instead(tmp_path):
    model = nn.Linear(2, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", keep="rows") as recorder:
        recorder.batch(sample_id=[0, 1])
        model(torch.randn(2, 8, 2, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    expected = r"keeps what each row adds up to over its positions.*contributions\(\) or influence\(\).*keep=\"slots\""
    with pytest.raises(NotRecordedError, match=expected):
        dual.attend(torch.randn(1, 3, 2, dtype=torch.float64))
    with pytest.raises(NotRecordedError, match=expected):
        dual.layer("").attention_weights(torch.randn(2, dtype=torch.float64))
    contributions = dual.contributions(torch.randn(1, 3, 2, dtype=torch.float64), target=lambda y: y.sum((1, 2)))[""]
    with pytest.raises(NotRecordedError, match=expected):
        contributions.total("position")
    with pytest.raises(NotRecordedError, match=expected):
        contributions.total("sample_id", where=pl.col("position") > 1)
    with pytest.raises(NotRecordedError, match="no keys of single slots"):
        _ = dual.layer("").keys
    with pytest.raises(NotRecordedError, match="mislabelled"):
        dual.mislabelled()
    # The dual form itself needs no single slots
    x = torch.randn(3, 2, dtype=torch.float64)
    torch.testing.assert_close(dual.layer("")(x), model(x).detach())
    torch.testing.assert_close(dual.compact(2)[""](x), model(x).detach())
