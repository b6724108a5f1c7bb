import numpy as np
import polars as pl
import pytest
import torch

import dualform
from dualform.errors import QuestionError, UnknownLayerError
from dualform.query import scan
from dualform.store import slots
from reference import attention as reference
from reference import ranking
from training import samples, train

INPUTS, LABELS = samples()


def queries_of(trained, layer):
    return INPUTS if layer == "0" else trained.model[:2](INPUTS).detach()


@pytest.mark.parametrize("layer", ["0", "2"])
def test_weights_by_a_double_loop(trained, layer):
    keys = trained.dual.layer(layer).keys
    expected = reference.attention_weights(keys.tolist(), queries_of(trained, layer).tolist())
    pieces = list(trained.dual.attend(INPUTS)[layer].scores())
    assert len(pieces) > 1  # chunk by chunk
    assert torch.cat([slots for slots, _ in pieces]).tolist() == list(range(30))
    found = torch.cat([scores for _, scores in pieces], dim=-1)
    assert found.shape == (12, 1, 30)
    np.testing.assert_allclose(found[:, 0].numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("layer", ["0", "2"])
@pytest.mark.parametrize("k", [1, 4, 100])
@pytest.mark.parametrize("way", ["highest", "lowest", "absolute"])
def test_top_is_the_head_of_a_full_sort(trained, layer, k, way):
    keys = trained.dual.layer(layer).keys
    scores = (queries_of(trained, layer) @ keys.T).tolist()
    settings = {} if way == "highest" else {way: True}
    found = trained.dual.attend(INPUTS)[layer].top(k, **settings)
    sign = {
        "highest": lambda x: round(x, 12),
        "lowest": lambda x: round(-x, 12),
        "absolute": lambda x: round(abs(x), 12),
    }
    for query in range(12):
        mine = found.filter(pl.col("query") == query)
        expected = ranking.top([sign[way](score) for score in scores[query]], k)
        assert mine["weight"].to_list() == pytest.approx([scores[query][slot] for slot in expected], abs=1e-12)
        assert mine["rank"].to_list() == list(range(1, min(k, 30) + 1))


def test_equal_weights_go_to_the_lower_slot(trained):
    """The same sample was seen several times: its keys are equal in the first layer."""
    found = trained.dual.attend(INPUTS)["0"].top(30)
    for _, group in found.group_by("query", "weight"):
        assert group["slot"].is_sorted()
    scores = (INPUTS @ trained.dual.layer("0").keys.T).tolist()
    rounded = [[round(score, 12) for score in row] for row in scores]
    for query in range(12):
        assert found.filter(pl.col("query") == query)["slot"].to_list() == ranking.top(rounded[query], 30)


def test_the_frame_says_whose_slot_it_is(trained):
    found = trained.dual.attend(INPUTS)["0"].top(5)
    head = ["query", "position", "rank", "weight", "slot", "step", "sample_id", "label", "task"]
    assert found.columns[: len(head)] == head
    ids = torch.cat(trained.ids).tolist()
    for row in found.to_dicts():
        assert row["sample_id"] == ids[row["slot"]]
        assert row["step"] == row["slot"] // 5
        assert row["row"] == row["slot"]
        assert (row["backward"], row["call"], row["slot_position"]) == (0, 0, 0)
        assert row["weight"] == pytest.approx(float(INPUTS[row["query"]] @ INPUTS[row["sample_id"]]), abs=1e-13)


def test_top_where(trained):
    found = trained.dual.attend(INPUTS)["0"].top(4, where=pl.col("label") == 2)
    assert found["label"].unique().to_list() == [2]
    full = trained.dual.attend(INPUTS)["0"].top(30).filter(pl.col("label") == 2)
    assert found["slot"].to_list() == full.group_by("query", maintain_order=True).head(4)["slot"].to_list()


@pytest.mark.parametrize("way", [{}, {"absolute": True}, {"lowest": True}])
def test_the_best_of_each_group_in_one_scan(dual, way):
    attention = dual.attend(INPUTS[:3])["2"]
    together = attention.top(4, per="label", **way)
    apart = [
        attention.top(4, where=pl.col("label") == label, **way).filter(pl.col("query") == query)
        for query in range(3)
        for label in sorted(dual.rows["label"].unique())
    ]
    assert together.equals(pl.concat(apart))


def test_by_and_per_do_not_go_together(dual):
    with pytest.raises(QuestionError, match="by and per"):
        dual.attend(INPUTS[:1])["2"].top(2, by="label", per="label")


def test_nothing_left_by_a_mask(dual):
    attention = dual.attend(INPUTS)["0"]
    found, full = attention.top(4, where=pl.col("label") == 99), attention.top(4)
    assert found.height == 0
    assert found.schema == full.schema
    assert attention.top(4, by="label", where=pl.col("label") == 99).height == 0
    assert list(attention.scores(where=pl.col("label") == 99)) == []
    assert attention.total("label", where=pl.col("label") == 99)["total"].to_list() == [0.0] * 48


@pytest.mark.parametrize("layer", ["0", "2"])
def test_an_empty_batch_of_queries(dual, layer):
    attention = dual.attend(INPUTS[:0])[layer]
    for how in ({}, {"per": "label"}):
        assert attention.top(3, **how).height == 0
        assert attention.top(3, **how).schema == dual.attend(INPUTS)[layer].top(3, **how).schema
    assert attention.total("label").height == 0
    assert attention.top(3, by="label").height == 0
    assert all(scores.shape[:2] == (0, 1) for _, scores in attention.scores())


@pytest.mark.parametrize("size", [1, 700, 3000])
def test_tiles_and_pieces_of_any_size_give_the_same(dual, monkeypatch, size):
    def ask():
        attention = dual.attend(INPUTS)["0"]
        top = attention.top(7, absolute=True)
        return top, attention.total("label"), attention.top(2, by="sample_id")

    expected = ask()
    monkeypatch.setattr(scan, "BLOCK_BYTES", 4 * size)
    monkeypatch.setattr(slots, "PIECE_BYTES", size)
    for found, frame in zip(ask(), expected, strict=True):
        assert found.drop("weight", "total", strict=False).equals(frame.drop("weight", "total", strict=False))
        for name in {"weight", "total"} & set(frame.columns):
            assert found[name].to_list() == pytest.approx(frame[name].to_list(), abs=1e-13)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"k": 0}, r"top\(0\): expected a whole number of at least 1"),
        ({"k": -3}, r"top\(-3\): expected a whole number"),
        ({"k": True}, r"top\(True\): expected a whole number"),
        ({"k": 2.5}, r"top\(2\.5\): expected a whole number"),
        ({"k": "3"}, r"top\(.?3.?\): expected a whole number"),
        ({"absolute": True, "lowest": True}, r"absolute and lowest do not go together"),
    ],
)
def test_questions_that_make_no_sense(dual, settings, words):
    with pytest.raises(QuestionError, match=words):
        dual.attend(INPUTS)["0"].top(**settings)


def test_an_unknown_layer(dual):
    with pytest.raises(UnknownLayerError, match=r"'4' was not recorded\. Recorded layers: '0', '2'"):
        dual.attend(INPUTS)["4"]


def test_the_answers_are_a_mapping_by_layer(dual):
    attention = dual.attend(INPUTS)
    assert list(attention) == ["0", "2"]
    assert len(attention) == 2
    assert "LayerAttention('0'" in repr(attention)


def test_nothing_is_computed_until_it_is_asked_for(trained, monkeypatch):
    dual = trained.dual
    monkeypatch.setattr(type(dual.store), "chunks", lambda *_, **__: pytest.fail("read slots"))
    dual.attend(INPUTS)


def test_in_eval_mode_whatever_the_mode_of_the_model(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(5, 4)).double().train()
    run = train(tmp_path / "run", model=model, steps=2)
    assert torch.equal(run.dual.attend(INPUTS)["1"].queries[:, 0], INPUTS)
    assert model.training


def test_the_state_of_the_random_generator_is_left_alone(dual):
    before = torch.random.get_rng_state()
    dual.attend(INPUTS)["0"].top(3)
    dual.contributions(INPUTS)["0"].top(3)
    assert torch.equal(torch.random.get_rng_state(), before)


# Without a model: vectors


def test_vectors_of_the_user(trained):
    dual = dualform.open(trained.path)
    assert dual.attend({"0": INPUTS})["0"].top(4).equals(trained.dual.attend(INPUTS)["0"].top(4))
    assert dual.attend({"0": INPUTS.numpy()})["0"].top(4).equals(trained.dual.attend(INPUTS)["0"].top(4))
    positions = dual.attend({"0": INPUTS.reshape(6, 2, 5)})["0"].top(1)
    assert positions.select("query", "position").rows() == [(q, p) for q in range(6) for p in range(2)]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (INPUTS, r"opened without a model.*query vectors by layer name.*dualform\.open\(path, model\)"),
        ({"0": INPUTS[:, :3]}, r"layer '0' have shape \(12, 3\); expected \(queries, 5\) or \(queries, positions, 5\)"),
        ({"0": INPUTS[0]}, r"shape \(5,\); expected \(queries, 5\)"),
        ({"4": INPUTS}, r"'4' was not recorded"),
    ],
)
def test_vectors_that_do_not_fit(trained, inputs, words):
    with pytest.raises(QuestionError, match=words):
        dualform.open(trained.path).attend(inputs)


# What goes into the model


class TwoInputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.map = torch.nn.Linear(5, 4)

    def forward(self, x, shift=None):
        return self.map(x if shift is None else x + shift)


@pytest.fixture(scope="module")
def two_inputs(tmp_path_factory):
    torch.manual_seed(0)
    return train(tmp_path_factory.mktemp("two") / "run", model=TwoInputs().double(), steps=2).dual


@pytest.mark.parametrize("inputs", [(INPUTS, INPUTS), {"x": INPUTS, "shift": INPUTS}])
def test_several_inputs(two_inputs, inputs):
    assert torch.equal(two_inputs.attend(inputs)["map"].queries[:, 0], 2 * INPUTS)


@pytest.mark.parametrize("inputs", ["hello", 3, {}, torch.tensor(3.0)])
def test_inputs_without_examples(two_inputs, inputs):
    with pytest.raises(QuestionError, match="expected a tensor, a tuple of the model's arguments, or a dictionary"):
        two_inputs.attend(inputs)


def test_a_layer_that_these_inputs_do_not_reach(tmp_path):
    class Switch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.use_b = torch.nn.Linear(5, 4), torch.nn.Linear(4, 4), True

        def forward(self, x):
            return self.b(self.a(x)) if self.use_b else self.a(x)

    torch.manual_seed(0)
    run = train(tmp_path / "run", model=Switch().double(), steps=2)
    run.model.use_b = False
    with pytest.raises(UnknownLayerError, match=r"'b' was not called for these inputs"):
        run.dual.attend(INPUTS)["b"]
