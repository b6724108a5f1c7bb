"""Keys that several slots share."""

import gc
import weakref

import polars as pl
import pytest
import torch

import dualform
from dualform.query.search import bounds, index
from dualform.query.search.bounds import key_numbers
from dualform.store import catalog
from full_scan import top_by_scan
from training import network, samples, sgd, train

INPUTS, LABELS = samples()


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
    folder = tmp_path_factory.mktemp("shared")
    whole = train(folder / "one", steps=12).dual
    chunks = train(folder / "many", steps=12, chunk_bytes=2000).dual
    assert len(chunks.store.manifest.chunks) > 2
    return {
        "one chunk": whole,
        "many chunks": chunks,
        "until 7": chunks.at(7),
        "until 1": chunks.at(1),
        "until 0": chunks.at(0),
        "resumed": resumed(folder / "resumed"),
    }


@pytest.fixture(params=["one chunk", "many chunks", "until 7", "until 1", "until 0", "resumed"])
def dual(request, duals):
    return duals[request.param]


def test_a_resumed_run_has_the_slots_that_count(duals):
    assert duals["resumed"].layer("0").slots == 9 * 5
    assert len(duals["resumed"].layer("0").keys.unique(dim=0)) < 9 * 5


def test_the_key_of_each_slot(dual):
    """By its number among the stored keys, it is the key that the slot had."""
    stored = torch.cat(
        [torch.zeros(0, 5), *(keys.clone() for _, keys in dual.store.passing("0", "key", torch.float64))]
    )
    keys = dual.layer("0").keys
    numbers = key_numbers(dual.store, "0", dual.end_step, torch.arange(len(keys)))
    assert torch.equal(stored[numbers], keys)
    backwards = torch.arange(len(keys)).flip(0)
    assert torch.equal(key_numbers(dual.store, "0", dual.end_step, backwards), numbers.flip(0))


def test_slots_that_share_no_keys(dual):
    """A hidden layer sees other keys each time: the key of a slot has the slot's number."""
    assert not dual.store.has_equal_keys("2")
    slots = torch.arange(dual.layer("2").slots)
    assert torch.equal(key_numbers(dual.store, "2", dual.end_step, slots), slots)


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


def test_questions_about_many_steps_take_no_more_memory_than_about_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "CACHED_STEPS", 3)
    monkeypatch.setattr(index, "FEWEST_SLOTS", 0)
    held = weakref.WeakSet()
    find = bounds._all_key_numbers

    def find_and_watch(store, layer, end):
        held.add(found := find(store, layer, end))
        return found

    monkeypatch.setattr(bounds, "_all_key_numbers", find_and_watch)
    dual = train(tmp_path / "run", steps=12).dual
    for step in range(1, 13):
        attention = dual.at(step).attend(INPUTS)["0"]
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


def test_attention_and_contributions_do_not_share_what_they_rank(duals, monkeypatch):
    """Attention ranks the keys of the first layer, contributions its slots; both are kept with the open store."""
    monkeypatch.setattr(index, "FEWEST_SLOTS", 0)
    dual = duals["one chunk"].reopened()
    attention, contributions = dual.attend(INPUTS)["0"], dual.contributions(INPUTS)["0"]
    for answer in (attention, contributions, attention):
        assert torch.equal(answer.best(5).slots, top_by_scan(answer, 5).slots)
