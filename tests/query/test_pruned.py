import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dualform
from dualform.errors import QuestionError
from dualform.native import picked, ranked
from dualform.native.picked import Picked
from dualform.query import answers, attention, pruned
from dualform.query import bounds as bounding
from dualform.query import sketch as sketching
from dualform.query.bounds import Contributions, Products, Seen
from dualform.query.pruned import Members, Wanted, best_of
from dualform.query.ranking import ranked_by
from dualform.query.sketch import lengths, sketch
from reference import ranking
from training import samples, train

INPUTS, _ = samples()
WAYS = ("highest", "lowest", "absolute")
NUMBERS = st.sampled_from([-3.0, -1.0, 0.0, 0.25, 1.0, 2.0, 9.0])  # products are exact, and often equal


def matrix(rows, columns):
    return hnp.arrays(np.float64, st.tuples(rows, st.just(columns)), elements=NUMBERS)


def seen(queries, vectors, numbers=None):
    vectors = torch.as_tensor(vectors)

    def known(fine):
        return sketch(len(vectors), vectors.dtype, lambda some, out: vectors[some], [(0, vectors)], fine=fine)

    numbers = torch.arange(len(vectors)) if numbers is None else numbers
    picked = Picked([(vectors, None)])
    return Seen(torch.as_tensor(queries), known, numbers, lambda some, out: vectors[some], lambda: picked)


@pytest.fixture
def always(monkeypatch):
    """Bounds are used for the smallest store, and whatever passes."""
    for module in (answers, attention):
        monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(pruned, "DENSE", 2.0)
    monkeypatch.setattr(pruned, "ENOUGH", 2)
    return monkeypatch


@given(
    keys=matrix(st.integers(1, 40), 3),
    queries=matrix(st.integers(1, 7), 3),
    k=st.integers(1, 9),
    look=st.integers(1, 15),
    block=st.integers(1, 4),
    groups=st.integers(1, 3),
    at_once=st.sampled_from([0, 1 << 20]),
    way=st.sampled_from(WAYS),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_pruning_changes_no_answer(keys, queries, k, look, block, groups, at_once, way, dtype):
    keys, queries = keys.astype(dtype), queries.astype(dtype)
    codes = (torch.arange(len(keys)) * 7 % 5 % groups).int()
    sizes = {"AT_ONCE": at_once, "QUERIES": block, "TILE": 3, "ENOUGH": 2, "FINE": 3, "LOOK": look, "TIMES": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**sizes, "DENSE": 2.0}.items():
            patch.setattr(pruned, name, value)
        numbers = torch.arange(len(keys)) * 2  # numbers are not places
        wanted = Wanted(k, way, Members(numbers, codes if groups > 1 else None, groups))
        found = best_of(Products(seen(queries, keys), way), len(queries), wanted, torch.from_numpy(keys).dtype)
    scores = torch.from_numpy(queries @ keys.T)
    for group, best in enumerate(found):
        mine = torch.nonzero(codes == group)[:, 0]
        for row in range(len(queries)):
            expected = ranking.top(ranked_by(scores[row, mine], way).tolist(), k)
            assert best.numbers[row].tolist() == numbers[mine[expected]].tolist()
            assert best.values[row].tolist() == scores[row, mine[expected]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compact", [False, True])
def test_no_score_is_beyond_its_bound(monkeypatch, dtype, scale, way, compact):
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
    here, places = slice(2, 7), torch.arange(10, 290)
    products = Products(seen(queries, keys), way)
    contributions = Contributions(seen(queries, keys), seen(slopes, errors), weight, bias, way)
    plain = {
        products: queries @ keys.T,
        contributions: (queries @ keys.T * weight + bias) * (slopes @ errors.T),
    }
    assert products._keys._known(False).seen.near.dtype == (torch.bfloat16 if compact else dtype)
    for bounds, scores in plain.items():
        torch.testing.assert_close(bounds.exact(here, places), scores[2:7, 10:290], rtol=1e-4, atol=1e-4 * scale)
        for fine in (False, True):
            for some in (places, slice(10, 290)):
                assert (ranked_by(scores[2:7, 10:290], way) <= bounds.bound(here, some, fine=fine)[1]).all()
        for few in (here, slice(3, 4)):  # all in one product of matrices, one in a loop of its own
            assert (ranked_by(scores[few, 10:290], way) <= bounds.finer(few, places)).all()
        assert (scores.abs() <= bounds.sizes[:, None] * bounds.lengths).all()


def test_a_sketch_bounds_inner_products():
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(500, 6, generator=generator) @ torch.randn(6, 50, generator=generator)
    keys, queries = few[:400] + 0.1 * torch.randn(400, 50, generator=generator), few[400:]
    for fine in (False, True):
        own, some = seen(queries, keys).both(slice(0, 100), slice(0, 400), fine=fine)
        off = (queries.double() @ keys.double().T - own.near.double() @ some.near.double().T).abs()
        assert (off <= own.rest[:, None] * some.rest).all()
        assert (some.rest < 0.3 * lengths(some)).all()  # that is what makes it worth while


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_fine_sketch_allows_for_its_few_bits(scale):
    """Vectors that have no rest: what is seen of them is off by rounding alone."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, 48, generator=generator) * scale for n in (2000, 50))
    own, some = seen(queries, keys).both(slice(0, 50), slice(0, 2000), fine=True)
    assert own.near.shape[1] == 48
    off = (queries.double() @ keys.double().T - own.near.double() @ some.near.double().T).abs()
    allowed = own.rest[:, None].double() * some.rest.double()
    assert (off <= allowed).all()
    assert (off > 0).any()
    # the worst case: each coordinate is as far from eight bits as can be
    worst = torch.full((1, 48), (1 + 2**-8) * scale)
    own, some = seen(worst, worst).both(slice(0, 1), slice(0, 1), fine=True)
    assert (worst.double() @ worst.double().T - own.near.double() @ some.near.double().T).abs() <= own.rest * some.rest


@pytest.mark.parametrize("at_once", [0, 1 << 22])
def test_few_keys_are_read(monkeypatch, at_once):
    monkeypatch.setattr(pruned, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(20_000, 4, generator=generator) @ torch.randn(4, 60, generator=generator)
    queries, read = keys[:5] + 0.01, []

    class Counted(Products):
        def exact(self, queries, places):
            read.append(len(places))
            return super().exact(queries, places)

    wanted = Wanted(3, "highest", Members(torch.arange(20_000)))
    [best] = best_of(Counted(seen(queries, keys), "highest"), 5, wanted, keys.dtype)
    assert torch.equal(best.numbers, (queries @ keys.T).topk(3, dim=1).indices)
    assert sum(read) < 500


def test_bounds_that_tell_nothing_are_given_up(monkeypatch):
    keys = torch.nn.functional.normalize(torch.randn(3000, 200, generator=torch.Generator().manual_seed(0)), dim=1)
    bounds = Products(seen(keys[:2], keys), "lowest")
    for at_once in (0, 1 << 20):
        monkeypatch.setattr(pruned, "AT_ONCE", at_once)
        assert best_of(bounds, 2, Wanted(900, "lowest", Members(torch.arange(3000))), keys.dtype) is None


def test_they_are_given_up_before_much_was_read(monkeypatch):
    for name, value in {"AT_ONCE": 0, "WIDE": 500, "ENOUGH": 100, "LOOK": 200}.items():
        monkeypatch.setattr(pruned, name, value)
    keys = torch.nn.functional.normalize(torch.randn(20_000, 200, generator=torch.Generator().manual_seed(0)), dim=1)
    read = []

    class Counted(Products):
        def exact(self, queries, places):
            read.append(len(places))
            return super().exact(queries, places)

    bounds = Counted(seen(keys[:1], keys), "lowest")
    assert best_of(bounds, 1, Wanted(10, "lowest", Members(torch.arange(20_000))), keys.dtype) is None
    assert sum(read) <= pruned.EARLY * pruned.DENSE * 20_000 + 1000


@pytest.mark.parametrize("small", [0, 1000])
@pytest.mark.parametrize(("k", "way"), [(0, {}), (True, {}), (2.5, {}), (3, {"absolute": True, "lowest": True})])
def test_best_refuses_what_top_refuses(tmp_path, monkeypatch, small, k, way):
    monkeypatch.setattr(answers, "SMALL", small)
    answer = train(tmp_path / "run", steps=1).dual.attend(INPUTS)["2"]
    for ask in (answer.top, answer.best):
        with pytest.raises(QuestionError):
            ask(k, **way)


@pytest.mark.parametrize("question", ["attend", "contributions"])
@pytest.mark.parametrize("way", [{}, {"lowest": True}, {"absolute": True}, {"where": pl.col("label") != 1}])
@pytest.mark.parametrize("per", [{}, {"per": "label"}])
@pytest.mark.parametrize("at_once", [0, 1 << 22])
def test_answers_are_those_of_all_scores(tmp_path, always, question, way, per, at_once):
    always.setattr(pruned, "AT_ONCE", at_once)
    dual = train(tmp_path / "run").dual
    for moment in (dual, dual.until(5)):
        for layer in dual.layers:
            bounded = getattr(moment, question)(INPUTS)[layer].top(4, **way, **per)
            with pytest.MonkeyPatch.context() as patch:
                for module in (answers, attention):
                    patch.setattr(module, "SMALL", 1 << 40)
                every = getattr(moment, question)(INPUTS)[layer].top(1000, **way, **per)
            [value] = {"weight", "contribution"} & set(every.columns)
            assert bounded["rank"].max() == 4
            ranking.agrees(bounded, every, value, rtol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 7, 1000])
@pytest.mark.parametrize("way", [{}, {"lowest": True}, {"absolute": True}])
@pytest.mark.parametrize("at_once", [0, 1 << 22])
def test_keys_that_several_slots_share(tmp_path, always, k, way, at_once):
    """The input layer sees each sample again and again: its keys are multiplied once."""
    always.setattr(pruned, "AT_ONCE", at_once)
    always.setattr(pruned, "QUERIES", 2)
    dual = train(tmp_path / "run", steps=12).dual
    assert dual.store.key_count("0") < dual.store.slots("0")
    for moment in (dual, dual.until(7)):
        bounded = moment.attend(INPUTS)["0"].top(k, **way)
        every = next(iter(moment.attend(INPUTS)["0"].weights()))
        for query in range(3):
            decides = ranked_by(every.scores[query, 0], next(iter(way), "highest")).tolist()
            expected = every.slots[ranking.top(decides, k)].tolist()
            assert bounded.filter(query=query)["slot"].to_list() == expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("question", ["attend", "contributions"])
@pytest.mark.parametrize("way", [{}, {"lowest": True}, {"absolute": True}, {"where": pl.col("label") != 1}])
@pytest.mark.parametrize("per", [{}, {"per": "label"}])
def test_the_loops_in_c_answer_as_the_plain_way(tmp_path, always, dtype, question, way, per):
    always.setattr(pruned, "MANY", 2)
    dual = train(tmp_path / "run", precision=torch.float32, dtype=dtype).dual
    for layer in dual.layers:
        compiled = getattr(dual, question)(INPUTS[:1].float())[layer].top(4, **way, **per)
        with pytest.MonkeyPatch.context() as patch:
            for module in (picked, ranked):
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
    always.setattr(pruned, "LOOK", 4)
    always.setattr(pruned, "TIMES", 1)
    where, queries = pl.col("epoch") == epoch, torch.randn(5, 6)
    attention = epochs.attend(queries)["0"]
    assert attention.best(3, where=where).slots.equal(attention._multiplied(3, "highest", where).slots)


@pytest.mark.parametrize("k", [1, 2, 9, 70])
@pytest.mark.parametrize("per", ["label", "epoch", ["epoch", "label"]])
@pytest.mark.parametrize("at_once", [0, 1 << 22])
def test_the_best_of_each_group_where_slots_share_keys(always, epochs, k, per, at_once):
    """By label a key is in one group, by epoch in three."""
    for name, value in {"AT_ONCE": at_once, "LOOK": 4, "TIMES": 1, "QUERIES": 2}.items():
        always.setattr(pruned, name, value)
    queries = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    bounded = epochs.attend(queries)["0"].top(k, per=per)
    always.setattr(attention.LayerAttention, "_pruned", lambda *_: None)
    plain = epochs.attend(queries)["0"].top(k, per=per)
    assert bounded.drop("weight").equals(plain.drop("weight"))
    assert np.allclose(bounded["weight"], plain["weight"], rtol=1e-5)


def test_before_the_first_step_there_is_nothing_to_rank(always, epochs):
    attention = epochs.until(0).attend(torch.randn(5, 6))["0"]
    for how in ({}, {"per": "label"}, {"where": pl.col("label") == 1}):
        assert attention.top(3, **how).is_empty()


def test_a_chunk_that_was_cut_has_keys_of_slots_that_no_longer_count(always, tmp_path):
    """Four samples in the first three steps, twelve in the later ones: as many keys as slots are left, in another order."""
    always.setattr(pruned, "LOOK", 4)
    always.setattr(pruned, "TIMES", 1)
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
            assert answer.best(3, where=where).slots.equal(answer._multiplied(3, "highest", where).slots)
