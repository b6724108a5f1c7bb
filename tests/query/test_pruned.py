import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dualform.errors import QuestionError
from dualform.query import attention, pruned
from dualform.query.pruned import best_of
from reference import ranking
from training import samples, train

INPUTS, _ = samples()

WAYS = {"highest": lambda s: s, "lowest": lambda s: -s, "absolute": lambda s: s.abs()}
NUMBERS = st.sampled_from([-3.0, -1.0, 0.0, 0.25, 1.0, 2.0, 9.0])  # products are exact, and often equal


@given(
    keys=hnp.arrays(np.float64, st.tuples(st.integers(0, 40), st.just(3)), elements=NUMBERS),
    queries=hnp.arrays(np.float64, st.tuples(st.integers(0, 7), st.just(3)), elements=NUMBERS),
    k=st.integers(1, 9),
    tile=st.integers(1, 15),
    block=st.integers(1, 4),
    way=st.sampled_from(sorted(WAYS)),
)
def test_pruning_changes_no_answer(keys, queries, k, tile, block, way):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruned, "BLOCK", block)
        tiles = [
            (torch.arange(low, min(low + tile, len(keys))), torch.from_numpy(keys[low : low + tile]))
            for low in range(0, len(keys), tile)
        ]
        best = best_of(torch.from_numpy(queries), tiles, k, WAYS[way])
    scores = queries @ keys.T
    for row in range(len(queries)):
        decides = WAYS[way](torch.from_numpy(scores[row])).tolist()
        expected = ranking.top(decides, k)
        assert best.numbers[row].tolist() == expected
        assert best.values[row].tolist() == scores[row, expected].tolist()


@pytest.mark.parametrize("many", [1, 1000])
@pytest.mark.parametrize(("k", "way"), [(0, {}), (True, {}), (2.5, {}), (3, {"absolute": True, "lowest": True})])
def test_best_refuses_what_top_refuses(tmp_path, monkeypatch, many, k, way):
    monkeypatch.setattr(attention, "MANY", many)
    answer = train(tmp_path / "run", steps=1).dual.attend(INPUTS)["2"]
    for ask in (answer.top, answer.best):
        with pytest.raises(QuestionError):
            ask(k, **way)


def test_short_keys_are_not_multiplied(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(2000, 5, generator=generator) * torch.linspace(2, 0.01, 2000).unsqueeze(1)
    queries, multiplied = torch.rand(10, 5, generator=generator), []

    def counted(scores):
        multiplied.append(scores.numel())
        return scores

    tiles = list(zip(torch.arange(2000).split(100), keys.split(100), strict=True))
    best = best_of(queries, tiles, 3, counted)
    assert torch.equal(best.numbers, (queries @ keys.T).topk(3, dim=1).indices)
    assert sum(multiplied) < 2000 * 10 / 4


@pytest.mark.parametrize("way", [{}, {"lowest": True}, {"absolute": True}, {"where": pl.col("label") != 1}])
def test_many_queries_get_what_few_get(tmp_path, monkeypatch, way):
    dual = train(tmp_path / "run").dual
    for layer in dual.layers:
        few = dual.attend(INPUTS)[layer].top(4, **way)
        monkeypatch.setattr(attention, "MANY", 1)
        many = dual.attend(INPUTS)[layer].top(4, **way)
        monkeypatch.undo()
        assert many["slot"].to_list() == few["slot"].to_list()
        assert np.allclose(many["weight"], few["weight"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 7, 1000])
@pytest.mark.parametrize("way", [{}, {"lowest": True}, {"absolute": True}])
def test_keys_that_several_slots_share(tmp_path, monkeypatch, k, way):
    """The input layer sees each sample again and again: its keys are multiplied once."""
    dual = train(tmp_path / "run", steps=12).dual
    assert dual.store.key_count("0") < dual.store.slots("0")
    for moment in (dual, dual.until(7)):
        few = moment.attend(INPUTS)["0"].top(k, **way)
        monkeypatch.setattr(attention, "MANY", 1)
        many = moment.attend(INPUTS)["0"].top(k, **way)
        monkeypatch.undo()
        assert many["slot"].to_list() == few["slot"].to_list()
