"""The page and the commands over a collection: attention and influence are there, what needs a recording is not."""

import json

import pytest
import torch
from browsing import browser, expect, needs_browser, page, settled
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.errors import NotRecordedError
from dualform.explorer.report import write
from dualform.explorer.server import Server
from dualform.explorer.session import Session
from dualform.explorer.subject import subject
from training import network, samples

SAID = "collected at 2 checkpoints, not recorded during training"


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    path = tmp_path_factory.mktemp("collected") / "run"
    inputs, labels = samples(torch.float32)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=5)
    states = {name: network(torch.float32, seed=seed).state_dict() for seed, name in enumerate(("early", "late"))}
    dualform.collect(
        network(torch.float32),
        loader,
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        path,
        columns={"label": 1},
        checkpoints=states,
        learning_rates=[0.1, 0.2],
    )
    return dualform.open(path, network(torch.float32))


@pytest.fixture(scope="module")
def session(dual):
    inputs, labels = samples(torch.float32)
    return Session(subject(dual, inputs, (inputs, labels)))


def test_what_can_be_asked(session):
    run = session.run()
    assert run.collected == SAID
    assert SAID in run.edits
    assert run.groups == []
    missing = {view.kind: view.missing for view in run.views}
    assert missing["attention"] == missing["influence"] == ""
    assert SAID in missing["contribution"]
    assert session.verify().passed
    assert "nothing was trained" in session.verify().lines[0].words


def test_answers(session):
    found = session.scoring.sources("test:0", "2", "attention", target=None, k=3, absolute=False, last=True)
    assert len(found.highest) == 3
    assert session.scoring.estimate([("test:0", 0)])
    influence = session.scoring.sources("test:0", "2", "influence", target=0, k=3, absolute=False, last=True)
    assert len(influence.highest) == 3
    assert "docs/trained-models.md" in session.reading.sample(["0"], "2", k=2).problem
    with pytest.raises(NotRecordedError, match=r"trained-models\.md"):
        session.edits.change("test:0", "label = 1")


def test_a_report(session, tmp_path):
    written = write(session, tmp_path / "report.html", tests=[0])
    assert written.examples == 1


@needs_browser
def test_the_page_says_what_it_is(session):
    with Server(session) as server, browser() as chromium, page(chromium, server.url) as shown:
        settled(shown)
        expect(shown.get_by_text(f"This run was {SAID}")).to_be_visible()
        expect(shown.get_by_text("the slots explain every gradient").first).to_be_visible()
        assert shown.get_by_role("link", name="Memory edit").count() == 0


def call(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})


def test_commands(dual, tmp_path):
    path = dual.store.location
    printed = call("info", path)
    assert SAID in printed.stdout
    assert "late: batches 3 to 6, learning rate 0.2" in printed.stdout
    assert json.loads(call("info", path, "--json").stdout)["origin"] == SAID
    verified = call("verify", path)
    assert verified.exit_code == 0
    assert "There is no sum to compare with the weights" in verified.stdout
    assert call("mislabelled", path).exit_code == 0
    refused = call("totals", path, "--by", "label")
    assert refused.exit_code == 2
    assert "docs/trained-models.md" in refused.stderr
    assert call("totals", path, "--by", "label", "--kind", "keys").exit_code == 0
    assert call("export", path, "--to", tmp_path / "exported").exit_code == 0
