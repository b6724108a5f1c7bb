from types import SimpleNamespace

import polars as pl
import pytest
import tiny
import torch

import dualform
from dualform import plugins
from dualform.errors import QuestionError
from dualform.evaluate import views
from dualform.evaluate.evaluation import prepare


def test_every_view_of_a_run_is_judged(recorded, tmp_path):
    found = dualform.evaluate(
        recorded, tiny.study(), out=tmp_path / "kept", subsets=12, repeats=2, views=list(views.VIEWS)
    )
    assert found.frame["view"].to_list() == ["attention", "contribution", "whitened", "kernel", "sketch"]
    assert found.frame["kind"].to_list() == ["attention", "contribution", "influence", "influence", "influence"]
    assert found.frame.filter(pl.col("low") > pl.col("lds")).height == 0
    assert found.frame["why"].null_count() == 5
    assert found.likeness > 0.5
    assert 0 < found.ceiling <= 1
    assert found.ratio("kernel", "attention").value == pytest.approx(found.frame["lds"][3] / found.frame["lds"][0])
    assert (found.subsets, found.repeats, found.samples, found.examples) == (12, 2, tiny.SAMPLES, tiny.TESTS)
    assert found.to_dict()["views"][0]["view"] == "attention"


def test_scores_are_in_the_order_of_the_samples(recorded):
    study = tiny.study()
    dual = dualform.open(recorded, tiny.network())
    plain = dual.contributions(study.inputs, target=study.target)
    scores = views.contribution(dual, study)
    assert scores.shape == (tiny.TESTS, tiny.SAMPLES)
    for layer in plain:
        for row in plain[layer].total("sample_id").to_dicts():
            scores[row["query"], row["sample_id"]] -= row["total"]
    assert float(scores.abs().max()) < 1e-5


def test_what_a_run_cannot_answer_is_told_in_its_place(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, _ = tiny.data()

    def train(ids, seed):
        return model

    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(2):
            recorder.batch(sample_id=torch.arange(10))
            optimizer.zero_grad()
            model(inputs[:10]).square().mean().backward()
            optimizer.step()
    study = tiny.study(model=model, train=train, target=lambda output: output[:, 0])
    found = dualform.evaluate(tmp_path / "run", study, subsets=3, repeats=1, views=["whitened", "kernel"])
    assert found.frame["lds"].null_count() == 1
    assert "softmax" in found.frame["why"][1]
    assert found.ceiling is None
    assert (tmp_path / "run-retrained").exists()


def test_estimate_first(recorded, tmp_path):
    asked = prepare(recorded, tiny.study(), out=tmp_path / "kept", subsets=4, repeats=1, views=["attention"])
    left = asked.estimate()
    assert left.trainings == 2
    assert left.seconds > 0


@pytest.fixture
def peers(monkeypatch):
    """Peers that a package adds: one whose package is installed, and one whose package is not."""
    table = {"here": views.Peer("torch", views.attention), "gone": views.Peer("no_such_package", views.attention)}
    entry = SimpleNamespace(name="peers", load=lambda: table)
    monkeypatch.setattr(plugins, "entry_points", lambda group: {"peers": entry} if group == plugins.VIEWS else {})


def test_installed_peers_are_chosen_where_the_samples_are_known(recorded, tmp_path, peers):
    chosen = prepare(recorded, tiny.study(), out=tmp_path / "kept").views
    assert list(chosen) == [*views.VIEWS, "here"]
    without = prepare(recorded, tiny.study(samples=None), out=tmp_path / "kept").views
    assert list(without) == list(views.VIEWS)


def test_peers_can_be_named(recorded, tmp_path, peers):
    chosen = prepare(recorded, tiny.study(), out=tmp_path / "kept", views=["here", "kernel"]).views
    assert list(chosen) == ["here", "kernel"]
    with pytest.raises(QuestionError, match=r"need no_such_package: pip install 'dualform\[peers\]'"):
        prepare(recorded, tiny.study(), views=["gone"])


def test_without_any_peers_the_message_names_the_extra(recorded, monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: {})
    with pytest.raises(QuestionError, match=r"come with pip install 'dualform\[peers\]'"):
        prepare(recorded, tiny.study(), views=["trak"])


def test_refusals(recorded, tmp_path):
    with pytest.raises(QuestionError, match="expected some of 'attention'"):
        prepare(recorded, tiny.study(), views=["tea leaves"])
    with pytest.raises(QuestionError, match="'number' is not there"):
        prepare(recorded, tiny.study(column="number"))
    with pytest.raises(QuestionError, match="workers=0"):
        prepare(recorded, tiny.study(), workers=0)
