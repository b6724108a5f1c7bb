"""Pruning by bounds changes no answer, and few slots are scored."""

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dualform
from dualform.errors import QuestionError
from dualform.native import highest, picked
from dualform.query import search
from dualform.query.ranking import rank_keys
from dualform.query.search import bounds as bounding
from dualform.query.search import candidates, index
from dualform.query.search import sketch as sketching
from dualform.query.search.bounds import AttentionBounds, ContributionBounds, Products
from dualform.query.search.candidates import best_members
from dualform.query.search.members import Members
from dualform.query.search.sketch import lengths, make_sketch
from full_scan import top_by_scan
from reference import ranking
from training import samples, train

INPUTS, _ = samples()
ORDERS = ("highest", "lowest", "absolute")
NUMBERS = st.sampled_from([-3.0, -1.0, 0.0, 0.25, 1.0, 2.0, 9.0])  # products are exact, and often equal


def matrix(rows, columns):
    return hnp.arrays(np.float64, st.tuples(rows, st.just(columns)), elements=NUMBERS)


class InMemory:
    """Vectors (n, d) with their sketch."""

    def __init__(self, vectors):
        self.vectors = torch.as_tensor(vectors)
        count = len(self.vectors)
        self.sketch = make_sketch(count, self.vectors.dtype, lambda some: self.vectors[some], [(0, self.vectors)])

    def dots(self, queries, numbers):
        return queries @ self.vectors[numbers].T


def products(queries, vectors):
    return Products(torch.as_tensor(queries), InMemory(vectors), torch.arange(len(vectors)))


@pytest.fixture
def always(monkeypatch):
    """Bounds are used for the smallest store, however many slots look promising."""
    monkeypatch.setattr(index, "FEWEST_SLOTS", 0)
    monkeypatch.setattr(candidates, "MANY", 2.0)
    monkeypatch.setattr(candidates, "ENOUGH", 2)
    return monkeypatch


@given(
    keys=matrix(st.integers(1, 40), 3),
    queries=matrix(st.integers(1, 7), 3),
    k=st.integers(1, 9),
    look=st.integers(1, 15),
    block=st.integers(1, 4),
    groups=st.integers(1, 3),
    at_once=st.sampled_from([0, 1 << 20]),
    order=st.sampled_from(ORDERS),
    many=st.sampled_from([0.25, 2.0]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_pruning_changes_no_answer(keys, queries, k, look, block, groups, at_once, order, many, dtype):
    keys, queries = keys.astype(dtype), queries.astype(dtype)
    codes = (torch.arange(len(keys)) * 7 % 5 % groups).int()
    sizes = {"AT_ONCE": at_once, "MOST_QUERIES": block, "TILE": 3, "ENOUGH": 2, "LOOK": look, "LOOK_PER_WANTED": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**sizes, "MANY": many}.items():
            patch.setattr(candidates, name, value)
        slots = torch.arange(len(keys)) * 2  # slot numbers are not places
        members = Members(slots, codes if groups > 1 else None, groups)
        bounds = AttentionBounds(products(queries, keys), order)
        found = best_members(bounds, members, k, order, len(queries), torch.from_numpy(keys).dtype)
    scores = torch.from_numpy(queries @ keys.T)
    for group, best in enumerate(found):
        mine = torch.nonzero(codes == group)[:, 0]
        for row in range(len(queries)):
            expected = ranking.top(rank_keys(scores[row, mine], order).tolist(), k)
            assert best.slots[row].tolist() == slots[mine[expected]].tolist()
            assert best.scores[row].tolist() == scores[row, mine[expected]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("compact", [False, True])
def test_no_score_is_beyond_its_bound(monkeypatch, dtype, scale, order, compact):
    """compact: very many vectors, in bfloat16, that are decoded a few at a time."""
    if compact:
        monkeypatch.setattr(sketching, "SKETCH_BYTES", 0)
        monkeypatch.setattr(bounding, "STRETCH", 7)
    generator = torch.Generator().manual_seed(0)

    def draw(n, d):
        return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)

    keys, errors, weight, bias = draw(300, 40) * scale, draw(300, 30), draw(300, 1)[:, 0], draw(300, 1)[:, 0] * scale
    keys[:20], errors[20:40] = 0, 0
    queries, slopes = draw(7, 40), draw(7, 30)
    places = torch.arange(10, 290)
    by_key, by_error = products(queries, keys), products(slopes, errors)
    plain = {
        AttentionBounds(by_key, order): queries @ keys.T,
        ContributionBounds(by_key, by_error, weight, bias, order): (queries @ keys.T * weight + bias)
        * (slopes @ errors.T),
    }
    assert by_key._vectors.sketch.vectors.near.dtype == (torch.bfloat16 if compact else dtype)
    for bounds, scores in plain.items():
        for here in (slice(2, 7), slice(3, 4)):  # a product of matrices; a single query, in a loop of its own
            expected = scores[here, 10:290]
            torch.testing.assert_close(bounds.exact(here, places), expected, rtol=1e-4, atol=1e-4 * scale)
            assert (rank_keys(expected, order) <= bounds.bound(here, places)[1]).all()
        assert (scores.abs() <= bounds.sizes[:, None] * bounds.lengths).all()


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_all_vectors_are_estimated_as_those_that_are_picked(queries, is_shuffled):
    """Of all vectors in their order none are picked; as many in another order are."""
    generator = torch.Generator().manual_seed(0)
    own, vectors = torch.randn(queries, 40, generator=generator), InMemory(torch.randn(300, 40, generator=generator))
    numbers = torch.randperm(300, generator=generator) if is_shuffled else torch.arange(300)
    products = Products(own, vectors, numbers)
    estimates, rests, rests_of_vectors = products.estimate(slice(0, queries), torch.arange(300))
    near, rest = vectors.sketch.vectors
    expected = vectors.sketch.of(own).near.double() @ near[numbers].double().T
    torch.testing.assert_close(estimates.double(), expected, rtol=1e-5, atol=1e-5)
    assert rests.equal(vectors.sketch.of(own).rest)
    assert rests_of_vectors.equal(rest[numbers])


def test_a_sketch_bounds_inner_products():
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(500, 6, generator=generator) @ torch.randn(6, 50, generator=generator)
    keys, queries = few[:400] + 0.1 * torch.randn(400, 50, generator=generator), few[400:]
    sketch = InMemory(keys).sketch
    own = sketch.of(queries)
    off = (queries.double() @ keys.double().T - own.near.double() @ sketch.vectors.near.double().T).abs()
    assert (off <= own.rest[:, None] * sketch.vectors.rest).all()
    assert (sketch.vectors.rest < 0.3 * lengths(sketch.vectors)).all()  # that is what makes it worth while


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_compact_sketch_allows_for_its_few_bits(monkeypatch, scale):
    """Vectors that have no rest: their coordinates are off by rounding alone."""
    monkeypatch.setattr(sketching, "SKETCH_BYTES", 0)
    monkeypatch.setattr(sketching, "DIRECTIONS", (48,))
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, 48, generator=generator) * scale for n in (2000, 50))
    # the worst case: each coordinate is as far from eight bits as can be
    worst = torch.full((1, 48), (1 + 2**-8) * scale)
    for some, others in ((queries, keys), (worst, worst)):
        sketch = InMemory(others).sketch
        own = sketch.of(some)
        assert own.near.shape[1] == 48
        off = (some.double() @ others.double().T - own.near.double() @ sketch.vectors.near.double().T).abs()
        assert (off <= own.rest[:, None].double() * sketch.vectors.rest.double()).all()
        assert (off > 0).any()


class Counted(AttentionBounds):
    """Counts the slots that are scored."""

    scored = 0

    def exact(self, queries, places):
        self.scored += len(places)
        return super().exact(queries, places)


@pytest.mark.parametrize("at_once", [0, 1 << 22])
def test_few_slots_are_scored(monkeypatch, at_once):
    monkeypatch.setattr(candidates, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(20_000, 4, generator=generator) @ torch.randn(4, 60, generator=generator)
    queries = keys[:5] + 0.01
    bounds = Counted(products(queries, keys), "highest")
    [best] = best_members(bounds, Members(torch.arange(20_000)), 3, "highest", 5, keys.dtype)
    assert torch.equal(best.slots, (queries @ keys.T).topk(3, dim=1).indices)
    assert bounds.scored < 500


def random_directions(count):
    return torch.nn.functional.normalize(torch.randn(count, 200, generator=torch.Generator().manual_seed(0)), dim=1)


@pytest.mark.parametrize("at_once", [0, 1 << 20])
@pytest.mark.parametrize("k", [10, 900])
def test_where_bounds_tell_nothing_no_slot_is_scored_twice(monkeypatch, at_once, k):
    monkeypatch.setattr(candidates, "AT_ONCE", at_once)
    keys = random_directions(3000)
    bounds = Counted(products(keys[:2], keys), "lowest")
    [best] = best_members(bounds, Members(torch.arange(3000)), k, "lowest", 2, keys.dtype)
    assert torch.equal(best.slots, (keys[:2] @ keys.T).sort(dim=1, stable=True).indices[:, :k])
    assert bounds.scored <= 3000


@pytest.mark.parametrize("small", [0, 1000])
@pytest.mark.parametrize(("k", "way"), [(0, {}), (True, {}), (2.5, {}), (3, {"absolute": True, "lowest": True})])
def test_best_refuses_what_top_refuses(tmp_path, monkeypatch, small, k, way):
    monkeypatch.setattr(index, "FEWEST_SLOTS", small)
    answer = train(tmp_path / "run", steps=1).dual.attend(INPUTS)["2"]
    for ask in (answer.top, answer.best):
        with pytest.raises(QuestionError):
            ask(k, **way)


@pytest.mark.parametrize("question", ["attend", "contributions"])
@pytest.mark.parametrize("way", [{}, {"lowest": True}, {"absolute": True}, {"where": pl.col("label") != 1}])
@pytest.mark.parametrize("per", [{}, {"per": "label"}])
@pytest.mark.parametrize("at_once", [0, 1 << 22])
def test_answers_are_those_of_a_full_scan(tmp_path, always, question, way, per, at_once):
    always.setattr(candidates, "AT_ONCE", at_once)
    dual = train(tmp_path / "run").dual
    for moment in (dual, dual.at(5)):
        for layer in dual.layers:
            bounded = getattr(moment, question)(INPUTS)[layer].top(4, **way, **per)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(search, "USE_INDEX", False)
                every = getattr(moment, question)(INPUTS)[layer].top(1000, **way, **per)
            [value] = {"weight", "contribution"} & set(every.columns)
            assert bounded["rank"].max() == 4
            ranking.agrees(bounded, every, value, rtol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 7, 1000])
@pytest.mark.parametrize("way", [{}, {"lowest": True}, {"absolute": True}])
@pytest.mark.parametrize("at_once", [0, 1 << 22])
def test_keys_that_several_slots_share(tmp_path, always, k, way, at_once):
    """The input layer sees each sample again and again: its keys are multiplied once."""
    always.setattr(candidates, "AT_ONCE", at_once)
    always.setattr(candidates, "MOST_QUERIES", 2)
    dual = train(tmp_path / "run", steps=12).dual
    assert dual.store.key_count("0") < dual.store.slots("0")
    for moment in (dual, dual.at(7)):
        bounded = moment.attend(INPUTS)["0"].top(k, **way)
        every = next(iter(moment.attend(INPUTS)["0"].scores()))
        for query in range(3):
            decides = rank_keys(every.scores[query, 0], next(iter(way), "highest")).tolist()
            expected = every.slots[ranking.top(decides, k)].tolist()
            assert bounded.filter(query=query)["slot"].to_list() == expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("question", ["attend", "contributions"])
@pytest.mark.parametrize("way", [{}, {"lowest": True}, {"absolute": True}, {"where": pl.col("label") != 1}])
@pytest.mark.parametrize("per", [{}, {"per": "label"}])
def test_the_loops_in_c_answer_as_the_plain_way(tmp_path, always, dtype, question, way, per):
    dual = train(tmp_path / "run", precision=torch.float32, dtype=dtype).dual
    for layer in dual.layers:
        compiled = getattr(dual, question)(INPUTS[:1].float())[layer].top(4, **way, **per)
        with pytest.MonkeyPatch.context() as patch:
            for module in (picked, highest):
                patch.setattr(module, "kernels", lambda: None)
            plain = getattr(dual, question)(INPUTS[:1].float())[layer].top(4, **way, **per)
        [value] = {"weight", "contribution"} & set(plain.columns)
        assert compiled.drop(value).equals(plain.drop(value))
        assert np.allclose(compiled[value], plain[value], rtol=1e-4, atol=1e-6)


@pytest.fixture
def epochs(tmp_path):
    """Three epochs over the same samples, each in another order: an epoch has as many slots as there are keys."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(60, 6), torch.arange(60) % 3
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for epoch in range(3):
            for ids in torch.randperm(60).split(20):
                recorder.batch(sample_id=ids, label=labels[ids], epoch=epoch)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs[ids]), labels[ids]).backward()
                optimizer.step()
    return dualform.open(tmp_path / "run", model)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_as_many_slots_as_keys_are_not_the_keys(always, epochs, epoch):
    always.setattr(candidates, "LOOK", 4)
    always.setattr(candidates, "LOOK_PER_WANTED", 1)
    where, queries = pl.col("epoch") == epoch, torch.randn(5, 6)
    attention = epochs.attend(queries)["0"]
    assert attention.best(3, where=where).slots.equal(top_by_scan(attention, 3, where=where).slots)


@pytest.mark.parametrize("k", [1, 2, 9, 70])
@pytest.mark.parametrize("per", ["label", "epoch", ["epoch", "label"]])
@pytest.mark.parametrize("at_once", [0, 1 << 22])
def test_the_best_of_each_group_where_slots_share_keys(always, epochs, k, per, at_once):
    """By label a key is in one group, by epoch in three."""
    for name, value in {"AT_ONCE": at_once, "LOOK": 4, "LOOK_PER_WANTED": 1, "MOST_QUERIES": 2}.items():
        always.setattr(candidates, name, value)
    queries = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    bounded = epochs.attend(queries)["0"].top(k, per=per)
    always.setattr(search, "USE_INDEX", False)
    plain = epochs.attend(queries)["0"].top(k, per=per)
    assert bounded.drop("weight").equals(plain.drop("weight"))
    assert np.allclose(bounded["weight"], plain["weight"], rtol=1e-5)


def test_before_the_first_step_there_is_nothing_to_rank(always, epochs):
    attention = epochs.at(0).attend(torch.randn(5, 6))["0"]
    for how in ({}, {"per": "label"}, {"where": pl.col("label") == 1}):
        assert attention.top(3, **how).is_empty()


def test_a_chunk_that_was_cut_has_keys_of_slots_that_no_longer_count(always, tmp_path):
    """Four samples in the first three steps, twelve in the later ones: as many keys as slots are left, in another order."""
    always.setattr(candidates, "LOOK", 4)
    always.setattr(candidates, "LOOK_PER_WANTED", 1)
    torch.manual_seed(0)
    inputs, labels = torch.randn(16, 6), torch.arange(16) % 3
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(recorder, batches):
        for ids in batches:
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()

    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        train(recorder, torch.tensor([[0, 1, 1, 2], [2, 3, 0, 0], [1, 3, 2, 1]]))
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        train(recorder, [torch.arange(12)])
    model.load_state_dict(kept)
    with dualform.record(model, optimizer, tmp_path / "run", resume=3) as recorder:
        train(recorder, torch.tensor([[15, 14, 13, 12]]))
    dual = dualform.open(tmp_path / "run", model)
    assert dual.store.manifest.chunks[0].keys[0] == dual.store.manifest.chunks[0].slots[0] == 12
    for answer in (dual.attend(torch.randn(5, 6))["0"], dual.contributions(torch.randn(5, 6))["0"]):
        for where in (None, pl.col("sample_id") > 0):
            assert answer.best(3, where=where).slots.equal(top_by_scan(answer, 3, where=where).slots)


@pytest.mark.parametrize(("dimensions", "expected"), [(10, 16), (30, 32), (100, 64)])
def test_a_sketch_has_as_many_directions_as_its_vectors_need(dimensions, expected):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(500, dimensions, generator=generator) @ torch.randn(dimensions, 200, generator=generator)
    assert InMemory(vectors).sketch.directions.shape == (200, expected)
    assert InMemory(vectors[:, :5]).sketch.directions.shape == (5, 5)
