"""The two levels of a tiny recorded Transformer beside loops over its slots and a softmax written out; and its page, from data."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from made import made
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform_paper.language import corpora, remark
from dualform_paper.language.queries import Query, chosen
from dualform_paper.language.transformer import PLACE, Settings, built, distances, evaluate, layer, train
from dualform_paper.language.two_levels import BEST, TwoLevels

TINY = Settings(width=8, heads=2, blocks=2, window=6, batch=3, steps=9)
BOOK = made(
    "a fox ran, and the crow sat on a tree. " * 4, "character", "the fox sat. the crow ran on! and a tree\n" * 2
)
QUERY = Query("test", 0, 9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same training, with all slots and with sums of keys by position."""
    both = [tmp_path_factory.mktemp(name) / "run" for name in ("slots", "totals")]
    for folder in both:
        train(BOOK, TINY, folder, slots=folder is both[0])
    return both


@pytest.fixture(scope="module")
def slots(folders):
    return dualform.open(folders[0], built(BOOK, TINY))


@pytest.fixture(scope="module")
def two(folders):
    return TwoLevels(folders[1], built(BOOK, TINY), BOOK, TINY.window)


def test_the_equation_behind_the_first_level_holds(slots):
    assert slots.verify().passed


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("block", [0, 1])
def test_the_first_level_is_the_mean_of_key_times_vector_over_a_positions_slots(slots, two, block, part):
    vectors = torch.randn(4, TINY.width)
    keys = slots.layer(layer(block, part)).keys
    places = np.concatenate([np.array(row) for row in slots.rows[PLACE].to_list()])
    sums, visits = np.zeros((4, len(BOOK.train))), np.zeros(len(BOOK.train))
    for key, place in zip(keys, places, strict=True):
        visits[place] += 1
        sums[:, place] += (vectors @ key).numpy()
    assert visits.min() != visits.max()  # else the mean would not be put to the test
    assert two.first_level(vectors, block) == pytest.approx(sums / np.maximum(visits, 1), abs=1e-5)


@pytest.mark.parametrize("block", [0, 1])
def test_the_second_level_is_the_softmax_of_queries_and_keys(two, block):
    shares, vectors = two.levels(QUERY, block)
    attention = two.model.blocks[block].attention
    q, k, _ = (vectors @ attention.in_proj_weight.T + attention.in_proj_bias).detach().chunk(3, 1)
    size = TINY.width // TINY.heads
    for head in range(TINY.heads):
        mine = slice(head * size, (head + 1) * size)
        logits = [
            float(q[-1, mine] @ k[j, mine]) / math.sqrt(size) - 0.5 ** (head + 1) * (len(vectors) - 1 - j)
            for j in range(len(vectors))
        ]
        expected = np.exp(logits) / np.exp(logits).sum()
        assert shares[head].numpy() == pytest.approx(expected, abs=1e-5)


def test_both_levels_together_are_attention_with_the_mixture(two):
    shares, vectors = two.levels(QUERY, 1)
    first = two.first_level(vectors, 1)
    assert two.first_level(shares @ vectors, 1) == pytest.approx(shares.numpy() @ first, abs=1e-4)


def test_nothing_looks_ahead():
    mask = distances(4, 2)
    assert mask[0].tolist()[2] == [-1.0, -0.5, 0.0, -math.inf]
    assert mask[1].tolist()[3] == [-0.75, -0.5, -0.25, 0.0]
    model = built(BOOK, TINY)
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])
    found = model(tokens)
    assert torch.equal(found[0, :3], found[1, :3])
    assert not torch.equal(found[0, 3], found[1, 3])


def test_every_token_of_a_text_is_predicted_once(two):
    ids = BOOK.test.ids[:20]
    total = 0.0
    for position in range(1, len(ids)):
        begin = 0 if position <= TINY.window else (position - 1) // 3 * 3 - 3  # windows begin at 0, 3, 6, …
        read = torch.tensor(ids[begin:position].astype("int64")).unsqueeze(0)
        total -= float(two.model(read)[0, -1].log_softmax(0)[int(ids[position])].detach())
    assert evaluate(two.model, ids, TINY.window) == pytest.approx(total / (len(ids) - 1), rel=1e-5)


def test_what_is_shown_are_the_best_positions(two):
    found = two.look(QUERY, 1)
    shares, vectors = two.levels(QUERY, 1)
    assert "".join(found.tokens) == "x␣ran,"
    assert found.shares == pytest.approx(shares.numpy(), abs=1e-6)
    best = two.first_level(vectors[-1:], 1)[0]
    assert found.asked.spots[0].weight == pytest.approx(best.max(), rel=1e-5)
    assert found.asked.spots[0].token == BOOK.passage(int(best.argmax())).token
    place, reading = next(iter(found.attended.items()))
    assert shares[:, place].max() == shares[:, :-1].max()
    assert reading.spots[0].weight == pytest.approx(two.first_level(vectors[[place]], 1).max(), rel=1e-5)
    assert [reading.name for reading in found.heads] == ["head 0", "head 1"]


def test_a_query_of_the_training_text_does_not_find_itself(two):
    scores = two.first_level(two.levels(Query("train", 0, 9), 1)[1][-1:], 1)[0]
    scores[9] = -math.inf
    assert two.look(Query("train", 0, 9), 1).asked.spots[0].weight == pytest.approx(scores.max(), rel=1e-5)


def test_numbers_over_queries_are_means(two):
    queries = chosen(BOOK, 3)
    found = two.measure(queries, 1)
    same, answers, entropies = [], [], []
    for query in queries:
        shares, vectors = two.levels(query, 1)
        scores = two.first_level(vectors[-1:], 1)[0]
        best = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:BEST]
        ids, asks = BOOK.train.ids, BOOK.test.ids[query.position]
        same += [ids[place] == asks for place in best]
        answers += [ids[min(place + 1, len(ids) - 1)] == int(two.answer(query).argmax()) for place in best]
        entropies.append([-sum(p * math.log2(p) for p in row) for row in shares.tolist()])
    assert found.asked.same_token == pytest.approx(np.mean(same))
    assert found.asked.answer == pytest.approx(np.mean(answers))
    assert found.bits == pytest.approx(np.mean(entropies, 0), abs=1e-5)


def test_the_page_from_data(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "load", lambda name, folder: BOOK)
    monkeypatch.setattr(remark, "QUERIES", 3)
    page = remark.run(tmp_path / "out", settings=replace(TINY, steps=3))
    content = page.read_text()
    assert "verified" in content
    assert "NOT verified" not in content
    for picture in re.findall(r"\((figures/[^)]+)\)", content):
        assert (tmp_path / "out" / picture).exists()
    assert not (tmp_path / "out" / "recording").exists()
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["settings"]["steps"] == len(found["losses"]) == 3
    assert len(next(iter(found["shown"].values()))) == TINY.blocks


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "load", lambda name, folder: BOOK)
    monkeypatch.setattr(remark, "QUERIES", 1)
    monkeypatch.setattr("dualform_paper.language.transformer.Settings", lambda **given: replace(TINY, **given))
    found = CliRunner().invoke(app, ["paper", "transformer", "--steps", "2", "--out", str(tmp_path), "--json"])
    assert found.exit_code == 0, found.output
    page = tmp_path / "transformer" / "index.md"
    assert json.loads(found.stdout) == {"transformer": str(page)}
    assert "Made by `dualform paper transformer --steps 2`" in page.read_text()
    refused = CliRunner().invoke(app, ["paper", "transformer", "--minutes", "2"])
    assert refused.exit_code == 2
