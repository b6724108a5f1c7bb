"""Keys that several slots share, beside a plain dictionary."""

import gc
import weakref

import numpy as np
import polars as pl
import pytest
import torch

import dualform
from dualform.query import visits as module
from dualform.query.groups import Groups
from dualform.query.visits import Visits
from dualform.store import moments
from training import network, samples, sgd, train

INPUTS, LABELS = samples()


def plain(dual):
    """{key, as a tuple: its slots, ascending}."""
    found = {}
    for slot, key in enumerate(dual.layer("0").keys.tolist()):
        found.setdefault(tuple(key), []).append(slot)
    return found


def visits_of(dual, layer="0"):
    return Visits(dual.store, layer, dual.end_step)


def resumed(path):
    """Sealed after step 5, then two more steps that do not count, then four others; in small chunks."""
    model = network()
    optimizer = sgd(model)
    order = torch.Generator().manual_seed(3)

    def steps(recorder, count):
        for _ in range(count):
            ids = torch.randint(0, len(INPUTS), (5,), generator=order)
            recorder.batch(sample_id=ids, label=LABELS[ids])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
            optimizer.step()

    with dualform.record(model, optimizer, path, dtype="float64", chunk_bytes=2000) as recorder:
        steps(recorder, 5)
        recorder.seal()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        momenta = {p: state["momentum_buffer"].clone() for p, state in optimizer.state.items()}
        steps(recorder, 2)
    model.load_state_dict(kept)
    for p, buffer in momenta.items():
        optimizer.state[p]["momentum_buffer"] = buffer
    with dualform.record(model, optimizer, path, dtype="float64", chunk_bytes=2000, resume=5) as recorder:
        steps(recorder, 4)
    return dualform.open(path, model)


@pytest.fixture(scope="module")
def duals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("visits")
    whole = train(folder / "one", steps=12).dual
    chunks = train(folder / "many", steps=12, chunk_bytes=2000).dual
    assert len(chunks.store.manifest.chunks) > 2
    return {
        "one chunk": whole,
        "many chunks": chunks,
        "until 7": chunks.until(7),
        "until 1": chunks.until(1),
        "until 0": chunks.until(0),
        "resumed": resumed(folder / "resumed"),
    }


@pytest.fixture(params=["one chunk", "many chunks", "until 7", "until 1", "until 0", "resumed"])
def dual(request, duals):
    return duals[request.param]


def test_a_resumed_run_has_the_slots_that_count(duals):
    assert duals["resumed"].layer("0").slots == 9 * 5
    assert len(plain(duals["resumed"])) < 9 * 5


@pytest.mark.parametrize("stretch", [1, 3, 8192])
def test_the_slots_of_each_key(dual, stretch, monkeypatch):
    monkeypatch.setattr(module, "STRETCH", stretch)
    visits, expected, found, before = visits_of(dual), plain(dual), {}, -1
    for numbers, keys in visits.keys(torch.float64):
        assert len(numbers) == len(keys) <= stretch
        assert numbers[0] > before  # ascending
        before = int(numbers[-1])
        counts, slots = visits.slots_of(numbers)
        for key, mine in zip(keys.tolist(), slots.split(counts.tolist()), strict=True):
            assert tuple(key) not in found
            found[tuple(key)] = mine.tolist()
    assert found == expected
    assert len(visits.key_of) == sum(map(len, expected.values()))


def test_slots_of_keys_in_any_order_and_several_times(duals):
    visits = visits_of(duals["many chunks"])
    numbers = torch.tensor([4, 0, 4, 2])
    counts, slots = visits.slots_of(numbers)
    expected = [np.flatnonzero(visits.key_of == number).tolist() for number in numbers.tolist()]
    assert [mine.tolist() for mine in slots.split(counts.tolist())] == expected
    assert len(visits.slots_of(numbers[:0])[1]) == 0


def test_keys_that_are_not_stored_once(dual):
    """A hidden layer sees other keys each time: each slot has its own, in order."""
    assert not dual.store.has_equal_keys("2")
    visits, slots = visits_of(dual, "2"), dual.layer("2").slots
    assert visits.key_of.tolist() == list(range(slots))
    found = list(visits.keys(torch.float64))
    assert torch.equal(torch.cat([torch.zeros(0, 7), *(keys for _, keys in found)]), dual.layer("2").keys)
    counts, mine = visits.slots_of(torch.arange(slots).flip(0))
    assert counts.tolist() == [1] * slots
    assert mine.tolist() == list(range(slots))[::-1]


@pytest.mark.parametrize("by", ["label", ["label", "sample_id"], "step"])
def test_how_many_slots_of_each_group(dual, by):
    visits = visits_of(dual)
    groups = Groups(dual.store, "0", by, dual.end_step)
    counts, first = visits.by_group(groups)
    table = dual.rows.select(groups.by).rows()
    values = groups.values.rows()
    assert counts.shape == (dual.store.key_count("0"), len(values))
    expected, earliest = {}, {}
    for slot, (key, value) in enumerate(zip(visits.key_of.tolist(), table, strict=True)):
        place = (key, values.index(value))
        expected[place] = expected.get(place, 0) + 1
        earliest.setdefault(values.index(value), slot)
    assert {(k, g): int(counts[k, g]) for k, g in torch.nonzero(counts).tolist()} == expected
    assert first.tolist() == [earliest[place] for place in range(len(values))]


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("by", ["label", "sample_id"])
def test_totals_of_a_layer_whose_slots_share_keys(dual, by, absolute):
    """Multiplied once for each key, not for each slot: the sums are the same."""
    found = dual.attend(INPUTS)["0"].total(by, absolute=absolute)
    keys, groups = dual.layer("0").keys.tolist(), dual.rows[by].to_list()
    for query, image in enumerate(INPUTS.tolist()):
        expected = {}
        for key, group in zip(keys, groups, strict=True):
            weight = sum(k * x for k, x in zip(key, image, strict=True))
            expected[group] = expected.get(group, 0.0) + (abs(weight) if absolute else weight)
        mine = found.filter(pl.col("query") == query)
        assert dict(zip(mine[by], mine["total"], strict=True)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_sizes_are_summed_and_not_the_size_of_a_sum(duals):
    """Else the test above would show nothing: products of both signs."""
    attention = duals["one chunk"].attend(INPUTS)["0"]
    signed, sizes = (attention.total("label", absolute=absolute)["total"] for absolute in (False, True))
    assert ((sizes - signed.abs()) > 0.1).any()


def test_many_moments_take_no_more_memory_than_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr(moments, "MOST", 3)
    dual, held = train(tmp_path / "run", steps=12).dual, weakref.WeakSet()
    plain = Visits.__init__
    monkeypatch.setattr(
        Visits, "__init__", lambda self, *given, **named: (held.add(self), plain(self, *given, **named))[1]
    )
    for step in range(1, 13):
        attention = dual.until(step).attend(INPUTS)["0"]
        assert attention.top(3).height == 3 * len(INPUTS)
        assert not attention.total("label").is_empty()
        gc.collect()
        assert len(held) <= 3
    assert held


def test_ties_go_to_the_lower_slot_even_if_its_key_was_stored_later(tmp_path):
    """Steps that do not count any more stored sample 2 before 4; then 4 came first."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(recorder, batches):
        for ids in torch.tensor(batches):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
            optimizer.step()

    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        steps(recorder, [[0, 1]])
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        steps(recorder, [[2, 4]])
    model.load_state_dict(kept)
    with dualform.record(model, optimizer, tmp_path / "run", resume=1) as recorder:
        steps(recorder, [[4, 2], [0, 1]])
    attention = dualform.open(tmp_path / "run", model).attend(torch.zeros(1, 5, dtype=torch.float64))["0"]
    for k in range(1, 7):
        assert attention.best(k).slots.tolist() == [list(range(k))]
