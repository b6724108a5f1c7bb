"""Networks that do not end with a recorded layer, or begin with words."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
import shared
from dualform.explorer.session import Session
from dualform.explorer.subject import subject


def recorded(folder, model, inputs, labels, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, folder, **settings) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(len(inputs)), label=labels)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return Session(subject(dualform.open(folder, model), inputs, (inputs, labels)))


def test_the_last_recorded_layer_need_not_make_the_output(tmp_path):
    torch.manual_seed(0)
    inputs, labels = torch.randn(8, 3), torch.arange(8) % 2
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    session = recorded(tmp_path / "part", model, inputs, labels, layers=["0"])
    assert not session.is_last("0")
    assert session.reading.sample(["0"], "0", k=2).units == []
    assert recorded(tmp_path / "whole", model, inputs, labels).is_last("2")


def test_who_reads_from_a_word(tmp_path):
    torch.manual_seed(0)
    words, labels = torch.tensor([[0, 1], [2, 2], [3, 1], [2, 0]]), torch.arange(4) % 2
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    session = recorded(tmp_path / "run", model, words, labels)
    readers = session.reading.sample(["1"], "0", k=4).readers
    # The example is the word 2 twice, at each of three visits: who has it once gets half of who has it twice
    assert {reader.example.input: reader.weight for reader in readers[:2]} == {"test:1": 12.0, "test:3": 6.0}
    assert [reader.weight for reader in readers[2:]] == [0.0, 0.0]


def test_an_example_whose_label_is_ignored_is_no_source(tmp_path):
    torch.manual_seed(0)
    inputs, labels = torch.randn(8, 3), torch.arange(8) % 2
    inputs[5] *= 100
    model = nn.Sequential(nn.Linear(3, 2))
    trained = labels.clone()
    trained[5] = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(len(inputs)), label=labels)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), trained).backward()
            optimizer.step()
    session = Session(subject(dualform.open(tmp_path / "run", model), inputs, (inputs, labels)))
    session.scoring.estimate([("test:5", 0)])
    expected = session.subject.dual.attend(inputs[5:6])["0"].total("label")["total"].to_list()
    for kind in ("attention", "contribution", "influence"):
        found = session.scoring.sources("test:5", "0", kind, target=0, k=8, absolute=False, last=True)
        assert 5 not in [source.key[0] for source in (*found.highest, *found.lowest)]
        assert sorted(source.key[0] for source in found.highest) == [0, 1, 2, 3, 4, 6, 7]
        assert [len(curve.values) for curve in found.curves] == [12, 9]
        if kind == "attention":
            assert [total.total for total in found.totals] == pytest.approx(expected, rel=1e-5)
    assert session.reading.sample(["5"], "0", k=2).visits == []
    sample = session.reading.sample(["6"], "0", k=2)
    assert [visit.step for visit in sample.visits] == [0, 1, 2]
    assert [visit.key for visit in sample.visits] == pytest.approx([float(inputs[6].norm())] * 3)


def test_what_serves_all_rows_is_called_shared(tmp_path):
    """It belongs to no class and to no example, but it is a part of what adds up."""
    dual = shared.train(tmp_path / "run")
    session = Session(subject(dual, shared.TEXT, (shared.TEXT, shared.LABELS)))
    session.scoring.estimate([("test:0", 1)])
    for kind in ("attention", "contribution", "influence"):
        found = session.scoring.sources("test:0", shared.SHARED, kind, target=1, k=8, absolute=False, last=False)
        assert [total.name for total in found.totals] == ["0", "1", "2", "shared"]
        assert [total.total for total in found.totals[:3]] == [0, 0, 0]
        assert found.totals[3].total != 0
        assert found.highest == found.lowest == found.curves == []
        assert found.time.cumulative[-1] == pytest.approx(found.totals[3].total, rel=1e-4)
    parts = session.scoring.split("test:0", shared.SHARED, 1)
    found = session.scoring.sources("test:0", shared.SHARED, "contribution", target=1, k=8, absolute=False, last=False)
    assert sum(total.total for total in found.totals) == pytest.approx(parts.slots, rel=1e-5)
    words = session.scoring.sources("test:0", "words", "attention", target=1, k=8, absolute=False, last=False)
    assert [total.name for total in words.totals] == ["0", "1", "2"]


def test_shared_totals_that_were_kept(tmp_path):
    dual = shared.train(tmp_path / "run", keep="totals", totals=["label"])
    session = Session(subject(dual, shared.TEXT, (shared.TEXT, shared.LABELS)))
    found = session.scoring.sources("test:0", shared.SHARED, "attention", target=1, k=8, absolute=False, last=False)
    assert [(total.name, total.total) for total in found.totals][-1] == ("shared", 4.0 * shared.STEPS)
