"""A recording of rows answers every question by row as a recording of slots of the same training does."""

import copy

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dualform
from dualform.errors import NotRecordedError, RecordingError
from dualform.record import row_gradients
from dualform.totals.build import build_totals
from recorded_networks import NETWORKS, assert_exact, parameters, target, train

pytestmark = pytest.mark.filterwarnings("ignore:not recorded, so taken from the snapshot")

WITH_LABELS_OF_POSITIONS = ("lstm", "gru", "rnn", "packed lstm", "packed gru", "gpt")
"""Networks with a label for each position: the kernel methods are not for them."""


@pytest.fixture
def always_summed(monkeypatch):
    """The layers are tiny, and their gradients not always smaller than their slots."""
    monkeypatch.setattr(row_gradients, "is_smaller", lambda layer, numbers: True)


def same_totals(one, other, atol=1e-12):
    assert one.drop("total").equals(other.drop("total"))
    size = max(1.0, one["total"].abs().max())
    assert (one["total"] - other["total"]).abs().max() <= atol * size


def same_weights(one, other, atol=1e-11):
    weights = parameters(other)
    for name, value in parameters(one).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=atol)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("network", NETWORKS)
def test_answers_by_row_are_those_of_slots(network, optimizer, tmp_path, always_summed):
    of_slots = train(network, optimizer, tmp_path / "slots", curvature=True)
    of_rows = train(network, optimizer, tmp_path / "rows", curvature=True, keep="rows", chunk_bytes=4096)
    assert_exact(of_rows.dual)
    inputs = of_slots.inputs[:3]
    asked = [run.dual.contributions(inputs, target=target) for run in (of_slots, of_rows)]
    same_totals(*(answer.total("sample_id") for answer in asked))
    same_totals(*(answer.total("label", where="step < 4 AND sample_id <> 2") for answer in asked))
    for layer in asked[0]:
        one, other = (answer[layer].parts() for answer in asked)
        torch.testing.assert_close(one.to_torch(), other.to_torch(), rtol=0, atol=1e-12)
        same_totals(*(answer[layer].total("sample_id") for answer in asked))
    masked = [run.dual.masked(drop=pl.col("sample_id") == 2) for run in (of_slots, of_rows)]
    same_weights(*masked)
    same_weights(of_slots.dual.masked(only="label = 1"), of_rows.dual.masked(only="label = 1"))


@pytest.mark.parametrize("network", NETWORKS)
def test_influence_of_rows_is_that_of_slots(network, tmp_path, always_summed):
    runs = [train(network, "sgd", tmp_path / keep, curvature=True, keep=keep) for keep in ("slots", "rows")]
    inputs = runs[0].inputs[:3]
    methods = ["whitened"] if network in WITH_LABELS_OF_POSITIONS else ["whitened", "kernel", "sketch"]
    for method in methods:
        found = [run.dual.influence(inputs, target=target, method=method, segments=[(0, 6)]) for run in runs]
        same_totals(*(answer.total("sample_id") for answer in found))
        one, other = (answer.top(3) for answer in found)
        assert one["row"].equals(other["row"])
        for layer in found[0]:
            same_totals(*(answer[layer].total("sample_id") for answer in found))


def test_whitened_influence_needs_the_curvature_that_was_counted(tmp_path, always_summed):
    run = train("gpt2", "sgd", tmp_path / "without", keep="rows", curvature=False)
    with pytest.raises(NotRecordedError, match=r"curvature was not counted.*curvature=True"):
        run.dual.influence(run.inputs[:2], segments=[(0, 6)])
    run.dual.influence(run.inputs[:2], segments=[(0, 6)], method="kernel").top(2)
    counted = train("gpt2", "sgd", tmp_path / "with", keep="rows")
    counted.dual.influence(run.inputs[:2], segments=[(0, 6)]).top(2)
    with pytest.raises(NotRecordedError, match="a mean over tokens"):
        counted.dual.influence(run.inputs[:2], segments=[(0, 6)], loss_mean="rows")


class Mixed(nn.Module):
    """A layer whose gradient is sometimes smaller than its slots, and sometimes not."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.head(self.first(x).tanh()).mean(1)


def train_mixed(path, lengths, *, precision=torch.float64, autocast=None, silent=False, **settings):
    torch.manual_seed(0)
    model = Mixed().to(precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, path, **settings) as recorder:
        for step, length in enumerate(lengths):
            generator = torch.Generator().manual_seed(step)
            for half in range(2):  # two microbatches
                x = torch.randn(3, length, 6, generator=generator, dtype=torch.float64).to(precision)
                recorder.batch(sample_id=[3 * half, 3 * half + 1, 3 * half + 2], label=[half, 1, 2])
                with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                    losses = F.cross_entropy(model(x), torch.tensor([half, 1, 2]), reduction="none")
                if silent:
                    losses = losses * torch.tensor([1.0, 0.0, 1.0])  # the second row of each has no loss
                losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path, model)


@given(lengths=st.lists(st.sampled_from([1, 2, 4, 9]), min_size=1, max_size=5), data=st.data())
def test_slots_and_gradients_in_one_layer(lengths, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed")
    outputs = data.draw(st.sampled_from([None, {"head": [0, 2]}]))
    settings = {
        "outputs": outputs,
        "chunk_bytes": data.draw(st.sampled_from([1000, 1 << 20])),
        "silent": data.draw(st.booleans()),
    }
    of_slots = train_mixed(path / "slots", lengths, curvature=True, **settings)
    of_rows = train_mixed(path / "rows", lengths, keep="rows", curvature=True, **settings)
    assert of_rows.store.is_summed("first") == (max(lengths) > 2)
    assert_exact(of_rows)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    for by in ("sample_id", "label", "step"):
        one, other = (dual.contributions(x, target=0).total(by) for dual in (of_slots, of_rows))
        same_totals(one, other)
    if (
        outputs is None and settings["chunk_bytes"] > 1000
    ):  # else there are snapshots between, hence stretches without counts
        found = [dual.influence(x, target=0, segments=[(0, len(lengths))]) for dual in (of_slots, of_rows)]
        same_totals(*(answer.total("sample_id") for answer in found))
    if outputs is None:
        same_weights(of_slots.masked(drop="sample_id = 1"), of_rows.masked(drop="sample_id = 1"))
        same_weights(of_slots.at(len(lengths) // 2).model(), of_rows.at(len(lengths) // 2).model())
    slots, rows = of_slots.slots("first"), of_rows.slots("first")
    silent = slots.group_by("row").agg(pl.col("silent").all()).sort("row")
    assert rows.group_by("row").agg(pl.col("silent").all()).sort("row").equals(silent)
    # The best rows of a layer, with and without those that wrote nothing
    for kept_silent in (False, True):
        answer = of_rows.contributions(x, target=0, silent=kept_silent)["head"].top(2, by="sample_id")
        expected = of_slots.contributions(x, target=0, silent=kept_silent)["head"].top(2, by="sample_id")
        assert answer["sample_id"].equals(expected["sample_id"])


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_shorter_types_pass_the_same_bounds(stored, autocast, tmp_path):
    lengths = [9, 4, 9, 2, 9, 9]
    dual = train_mixed(tmp_path / "run", lengths, precision=torch.float32, autocast=autocast, dtype=stored, keep="rows")
    assert dual.store.is_summed("first")
    certificate = dual.verify()
    assert certificate.passed, str(certificate)


def test_totals_beside_rows_answer_as_slots_do(tmp_path, always_summed):
    runs = {}
    for name, settings in (("slots", {}), ("rows", {"keep": "rows", "totals": ["label"]}), ("later", {"keep": "rows"})):
        for optimizer in ("sgd", "adamw"):
            runs[name, optimizer] = train("gpt", optimizer, tmp_path / f"{name} {optimizer}", **settings)
    for optimizer in ("sgd", "adamw"):
        build_totals(tmp_path / f"later {optimizer}", "label")
        expected = runs["slots", optimizer].dual.contributions(runs["slots", optimizer].inputs[:2], target=target)
        for name in ("rows", "later"):
            run = runs[name, optimizer]
            assert run.dual.store.manifest.totals is not None
            found = run.dual.contributions(run.inputs[:2], target=target)
            same_totals(found.total("label"), expected.total("label"), atol=1e-10)
            same_weights(run.dual.masked(drop="label = 1"), runs["slots", optimizer].dual.masked(drop="label = 1"))


def test_a_recording_of_rows_is_resumed(tmp_path):
    """Chunks are cut, and the rows after them are recorded anew."""
    lengths = [9, 2, 9, 4, 9]
    torch.manual_seed(0)
    model = Mixed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def steps(recorder, numbers):
        for step in numbers:
            x = torch.randn(3, lengths[step], 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            recorder.batch(sample_id=[0, 1, 2])
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
            optimizer.step()

    with dualform.record(model, optimizer, tmp_path / "run", keep="rows") as recorder:
        steps(recorder, range(2))  # in one chunk with the two that are dropped
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        steps(recorder, range(2, 4))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with pytest.raises(RecordingError, match="other keep"):
        dualform.record(model, optimizer, tmp_path / "run", keep="slots", resume=2)
    with dualform.record(model, optimizer, tmp_path / "run", keep="rows", resume=2) as recorder:
        steps(recorder, range(2, 5))
    dual = dualform.open(tmp_path / "run", model)
    assert dual.end_step == 5
    assert_exact(dual)
    straight = train_straight(tmp_path / "straight", lengths)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    same_totals(*(one.contributions(x, target=0).total("step") for one in (dual, straight)))


def test_a_chunk_without_any_feature_map_is_cut(tmp_path):
    """All of a convolution's rows were summed: the chunk has their gradients alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(147, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(recorder, number):
        x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        recorder.batch(sample_id=[0, 1])
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.tensor([0, 1])).backward()
        optimizer.step()

    with dualform.record(model, optimizer, tmp_path / "run", keep="rows") as recorder:
        step(recorder, 0)
        saved = copy.deepcopy(model.state_dict())
        step(recorder, 1)
    model.load_state_dict(saved)
    with dualform.record(model, optimizer, tmp_path / "run", keep="rows", resume=1) as recorder:
        step(recorder, 1)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.store.is_summed("0")
    assert dual.end_step == 2
    assert_exact(dual)


def train_straight(path, lengths):
    torch.manual_seed(0)
    model = Mixed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, path) as recorder:
        for step, length in enumerate(lengths):
            x = torch.randn(3, length, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            recorder.batch(sample_id=[0, 1, 2])
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
            optimizer.step()
    return dualform.open(path, model)
