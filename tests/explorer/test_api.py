"""The answers of the API beside the library's own, asked the plain way."""

import asyncio
import json

import httpx
import numpy as np
import polars as pl
import pytest
import runs
import torch
from clients import Client, finished

import dualform
from dualform.explorer.app import application
from dualform.explorer.session import Session
from dualform.explorer.subject import subject


@pytest.fixture(scope="module")
def dual(session):
    return session.subject.dual


def inputs(session, number):
    return session.predictions.inputs(f"test:{number}")


def test_the_run_says_what_there_is(client, session):
    found = client.get("/api/run")
    assert found["steps"] == 16
    assert found["rows"] == 400
    assert [layer["name"] for layer in found["layers"]] == ["0", "2", "4"]
    assert [layer["last"] for layer in found["layers"]] == [False, False, True]
    assert found["samples"] == 200
    assert found["tests"] == len(session.subject.test)
    assert [one["name"] for one in found["units"]] == list("0123456789")
    assert found["draws"] is True
    assert 0 <= found["accuracy"] <= 1
    assert [(view["kind"], view["missing"]) for view in found["views"]] == [
        ("attention", ""),
        ("contribution", ""),
        ("influence", ""),
    ]


def test_the_log_is_whole_when_it_is_short(client, dual):
    [series] = client.get("/api/log")["series"]
    assert series["values"] == pytest.approx(dual.log["loss"].to_list())


def test_rows_are_counted(client, dual):
    found = client.get("/api/rows", column="label")
    assert sum(count["rows"] for count in found["counts"]) == dual.rows.height
    assert client.refused("/api/rows", column="nothing")[0] == 400


@pytest.mark.parametrize("right", [True, False])
def test_examples_are_filtered(client, session, right):
    found = client.get("/api/examples", right=right, limit=60)
    assert all(one["right"] is right for one in found["examples"])
    assert found["found"] == int((session.predictions.right == right).sum())


def test_examples_by_class_number_and_shuffled(client):
    assert {one["label"]["value"] for one in client.get("/api/examples", label="3")["examples"]} == {3}
    assert [one["input"] for one in client.get("/api/examples", number=7)["examples"]] == ["test:7"]
    first, second = (client.get("/api/examples", shuffle=seed)["examples"] for seed in (1, 2))
    assert [one["input"] for one in first] != [one["input"] for one in second]
    assert first == client.get("/api/examples", shuffle=1)["examples"]


def test_a_prediction_is_the_models(client, session, dual):
    found = client.get("/api/prediction", input="test:3")
    with torch.no_grad():
        expected = dual.model()(inputs(session, 3))[0]
    by_unit = {unit["unit"]: unit for unit in found["units"]}
    assert [by_unit[unit]["logit"] for unit in range(10)] == pytest.approx(expected.tolist(), rel=1e-5)
    assert found["answer"] == int(expected.argmax())
    assert sum(unit["probability"] for unit in found["units"]) == pytest.approx(1)


@pytest.mark.parametrize("layer", ["0", "2", "4"])
@pytest.mark.parametrize("kind", ["attention", "contribution"])
def test_sources_are_what_the_library_says(client, session, dual, layer, kind):
    found = client.get("/api/sources", input="test:3", layer=layer, kind=kind, k=6)
    asked = dual.attend if kind == "attention" else dual.contributions
    answer = asked(inputs(session, 3))[layer]
    top = answer.top(6, by="sample_id")
    assert [one["key"] for one in found["highest"]] == [[one] for one in top["sample_id"].to_list()]
    assert [one["weight"] for one in found["highest"]] == pytest.approx(top[answer.value].to_list(), rel=1e-4)
    assert [one["visits"] for one in found["highest"]] == top["visits"].to_list()
    totals = answer.total("label")
    assert [one["total"] for one in found["totals"]] == pytest.approx(totals["total"].to_list(), rel=1e-3, abs=1e-4)
    best = answer.top(500, per="label").filter(pl.col("label") == 0)[answer.value].to_list()
    curve = found["curves"][0]["values"]
    ranks = [rank for rank in found["ranks"] if rank <= len(best)]
    assert curve == pytest.approx([best[rank - 1] for rank in ranks], rel=1e-3, abs=1e-6)
    assert found["time"]["cumulative"][-1] == pytest.approx(totals["total"].sum(), rel=1e-3, abs=1e-3)


def test_the_strongest_visit_of_an_example_is_told(client, session, dual):
    found = client.get("/api/sources", input="test:3", layer="4")["highest"][0]
    slots = dual.attend(inputs(session, 3))["4"].top(400).filter(pl.col("sample_id") == found["key"][0])
    assert found["step"] == slots["step"][0]


def test_absolute_sums_sizes(client, session, dual):
    found = client.get("/api/sources", input="test:3", layer="0", absolute=True)
    expected = dual.attend(inputs(session, 3))["0"].total("label", absolute=True)["total"].to_list()
    assert [one["total"] for one in found["totals"]] == pytest.approx(expected, rel=1e-4)


def test_the_parts_of_the_last_layer_add_up(client, session):
    found = client.get("/api/sources", input="test:3", layer="4", kind="contribution", target=7)
    logit = next(u["logit"] for u in client.get("/api/prediction", input="test:3")["units"] if u["unit"] == 7)
    assert found["exact"] is True
    assert found["parts"]["target"] == pytest.approx(logit, rel=1e-5)
    total = found["parts"]["initial"] + sum(one["total"] for one in found["totals"])
    assert total == pytest.approx(logit, abs=1e-3)


def test_contributions_have_both_ends(client):
    found = client.get("/api/sources", input="test:3", layer="2", kind="contribution")
    assert found["highest"][0]["weight"] > 0 > found["lowest"][0]["weight"]
    assert found["exact"] is False


def test_influence_is_a_job_first(client, session, dual):
    status, words = client.refused("/api/sources", input="test:3", layer="4", kind="influence", target=2)
    assert (status, "job" in words) == (400, True)
    job = finished(client, kind="influence", input="test:3", target=2)
    assert job["state"] == "done", job
    found = client.get("/api/sources", input="test:3", layer="4", kind="influence", target=2, k=5)
    expected = dual.influence(inputs(session, 3), target=2)["4"].top(5, by="sample_id")
    assert [one["key"][0] for one in found["highest"]] == expected["sample_id"].to_list()


def test_an_edit_is_the_masked_model(client, session, dual):
    found = client.get("/api/edit", input="test:3", drop="label IN (3, 7) OR step >= 12")
    model = dual.masked(drop=pl.col("label").is_in([3, 7]) | (pl.col("step") >= 12))
    with torch.no_grad():
        expected = model(inputs(session, 3))[0].softmax(0)
    after = {unit["unit"]: unit["probability"] for unit in found["after"]["units"]}
    assert [after[unit] for unit in range(10)] == pytest.approx(expected.tolist(), abs=1e-5)
    assert found["dropped_rows"] == dual.rows.filter(pl.col("label").is_in([3, 7]) | (pl.col("step") >= 12)).height
    assert "does not predict" in found["sentence"]
    assert found["before"]["units"] == client.get("/api/prediction", input="test:3")["units"]


def test_accuracy_before_and_after_an_edit(client, session, dual):
    found = client.get("/api/accuracy", drop="label = 3")
    part = session.subject.test.parts[0]
    everything = part.batch(range(len(part)))
    labels = torch.tensor([part.label(n) for n in range(len(part))])
    places = np.unique(np.linspace(0, len(part) - 1, found["examples"]).round().astype(int))
    with torch.no_grad():
        right = dual.masked(drop=pl.col("label") == 3)(everything).argmax(1) == labels
    assert found["after"] == pytest.approx(float(right[places].double().mean()))
    assert sum(one["examples"] for one in found["classes"]) == found["examples"]


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        ("nothing = 1", "no column 'nothing'"),
        ("label", "gives Int64"),
        ("label =", "not an SQL condition"),
        ("label = 1; DROP TABLE rows", "unexpected ';'"),
        ("(SELECT 1 FROM read_csv('/etc/passwd')) = 1", "unexpected SELECT"),
        (f"label{'+0' * 500} = 3", "50 calculations on top of each other"),
    ],
)
def test_what_is_no_condition_is_told_in_words(client, drop, words):
    status, problem = client.refused("/api/edit", input="test:3", drop=drop)
    assert status == 400
    assert words in problem


@pytest.mark.parametrize(
    "input", ["test:99999", "test:-1", "test:x", "draw:12", "draw:" + "z" * 1024, "file:/etc/passwd", ""]
)
def test_inputs_that_are_none(client, input):
    assert client.refused("/api/prediction", input=input)[0] == 400


def test_a_drawing_is_answered(client):
    ink = ["0"] * 1024
    for row in range(6, 26):
        ink[32 * row + 16] = ink[32 * row + 15] = "f"
    found = client.get("/api/prediction", input="draw:" + "".join(ink))
    assert found["label"] is None
    assert found["shown"]["kind"] == "image"
    assert client.get("/api/sources", input="draw:" + "".join(ink), layer="4")["highest"]


def test_a_training_example(client, session, dual):
    sample = int(dual.rows["sample_id"][0])
    found = client.get("/api/sample", key=str(sample), layer="4")
    mine = dual.rows.with_row_index("row").filter(pl.col("sample_id") == sample)
    assert [visit["step"] for visit in found["visits"]] == mine["step"].to_list()
    slots = mine["row"].to_list()  # a slot for each row
    values = dual.layer("4").values[slots]
    for visit, value in zip(found["visits"], values, strict=True):
        assert visit["values"] == pytest.approx(value.tolist(), rel=1e-3, abs=1e-9)
    part = session.subject.test.parts[0]
    weights = dual.attend(part.batch(range(len(part))))["4"].total("sample_id", where=pl.col("sample_id") == sample)
    weights = weights.filter(pl.col("sample_id") == sample).sort(pl.col("total").abs(), descending=True)
    assert [int(one["example"]["input"][5:]) for one in found["readers"]] == weights["query"].head(12).to_list()
    reader = found["readers"][0]
    split = dual.contributions(part.batch([weights["query"][0]]))["4"].total(
        "sample_id", where=pl.col("sample_id") == sample
    )
    bias = float(values[:, reader["example"]["answer"]["value"]].sum())  # the bias's key is 1
    assert reader["contribution"] + bias == pytest.approx(
        split.filter(pl.col("sample_id") == sample)["total"][0], rel=1e-3
    )


def test_a_training_example_that_is_not_there(client):
    assert "no training example" in client.refused("/api/sample", key="123456", layer="4")[1]
    assert "named by sample_id" in client.refused("/api/sample", key=["1", "2"], layer="4")[1]


def test_suspects_are_ranked(client, dual):
    job = finished(client, kind="suspects")
    expected = dual.mislabelled(40)
    assert [one["key"][0] for one in job["result"]["suspects"]] == expected["sample_id"].to_list()
    assert client.get("/api/suspects", offset=1, limit=1)["suspects"][0]["rank"] == 2
    first = expected["sample_id"][0]
    assert client.get("/api/sample", key=str(first), layer="4")["suspicion_rank"] == 1


def test_verify_says_the_gap_in_words(client):
    result = finished(client, kind="verify")["result"]
    assert result["passed"] is True
    assert "one part in" in result["lines"][0]["words"]


def test_jobs_that_fail_or_are_not_there(client):
    assert "no column" in finished(client, kind="totals", by=["nothing"])["problem"]
    assert client.refused("/api/jobs/none")[0] == 404
    assert client("DELETE", "/api/jobs/none").status_code == 404


def test_totals_make_edits_fast(tmp_path):
    own = runs.digits(tmp_path / "demo")
    from dualform.explorer.runs import find

    client = Client(application(Session(find(own))))
    slow = client.get("/api/edit", input="test:3", drop="label = 3")
    before = client.get("/api/run")
    assert [group["fast"] for group in before["groups"]] == [False]
    assert finished(client, kind="totals", by=["label"])["state"] == "done"
    assert [group["fast"] for group in client.get("/api/run")["groups"]] == [True]
    fast = client.get("/api/edit", input="test:3", drop="label = 3")
    assert (slow["fast"], fast["fast"]) == (False, True)
    one, other = ({unit["unit"]: unit["probability"] for unit in found["after"]["units"]} for found in (slow, fast))
    assert one == pytest.approx(other, abs=1e-4)


def test_a_question_never_starts_a_long_edit_and_says_how_to(app, client, dual, monkeypatch):
    from dualform.explorer import edits
    from dualform.explorer.work import Jobs

    started, start = [], Jobs.start
    monkeypatch.setattr(Jobs, "start", lambda self, kind, work: (started.append(kind), start(self, kind, work))[1])
    monkeypatch.setattr(edits, "SMALL", 0)
    for address, asked in (("/api/edit", {"input": "test:3"}), ("/api/accuracy", {})):
        status, problem = client.refused(address, drop="step < 5", **asked)
        assert status == 409
        assert "POST /api/jobs" in problem
    assert started == []
    job = finished(client, kind="edit", input="test:3", drop="step < 5")
    assert job["state"] == "done"
    assert job["result"]["dropped_rows"] == dual.rows.filter(pl.col("step") < 5).height
    assert client.get("/api/accuracy", drop="step < 5")["examples"] > 0  # the edited model is kept
    assert started == ["edit"]


def test_a_single_example_is_no_long_edit(client, dual, monkeypatch):
    from dualform.explorer import edits

    monkeypatch.setattr(edits, "SMALL", 10_000)  # the demo's slots, all of them: 400 rows, 1000 numbers each
    sample = dual.rows["sample_id"][0]
    assert client.get("/api/edit", input="test:3", drop=f"sample_id = {sample}")["dropped_rows"] == 2
    assert client.refused("/api/edit", input="test:3", drop="label = 6")[0] == 409


def test_unnamed_rows_and_no_data(tmp_path):
    """A recording without sample_id, and nothing but test inputs."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.batch(weather=[1, 2, 3, 4])
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    session = Session(subject(dualform.open(tmp_path / "run", model), test=torch.ones(2, 3)))
    client = Client(application(session))
    run = client.get("/api/run")
    assert (run["by"], run["label"], run["accuracy"]) == ([], "", None)
    found = client.get("/api/sources", input="test:0", layer="0")
    assert found["highest"][0]["shown"]["kind"] == "none"
    assert found["totals"] == []
    assert finished(client, kind="influence", input="test:0", target=1)["state"] == "done"  # of single rows
    found = client.get("/api/sources", input="test:0", layer="0", kind="influence", target=1, k=12)
    expected = session.subject.dual.influence(torch.ones(1, 3), target=1)["0"].top(12)
    assert sorted(one["key"][0] for one in found["highest"]) == sorted(expected["slot"].to_list())
    assert client.get("/api/prediction", input="test:0")["shown"]["kind"] == "vector"


def test_totals_only(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    with dualform.record(model, optimizer, tmp_path / "run", keep="totals", totals=["label"]) as recorder:
        for _ in range(3):
            recorder.batch(label=y)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    client = Client(application(Session(subject(dual, test=(x, y)))))
    found = client.get("/api/sources", input="test:0", layer="0", kind="contribution", target=1)
    assert found["highest"] == []
    expected = dual.contributions(x[:1], target=1)["0"].total("label")["total"].to_list()
    assert [one["total"] for one in found["totals"]] == pytest.approx(expected)
    assert client.get("/api/run")["samples"] == 0


def test_numbers_that_are_none_are_null(client, session, monkeypatch):
    monkeypatch.setattr(session.predictions, "logits", lambda address, model=None: torch.full((10,), float("nan")))
    found = client("GET", "/api/prediction", params={"input": "test:3"})
    assert found.status_code == 200
    assert json.loads(found.text)["units"][0]["logit"] is None


def test_one_scan_answers_all_that_wait(folder, monkeypatch):
    """Twenty clients at once: the scans are few, and everybody gets their own answer."""
    from dualform.explorer.runs import find

    session = Session(find(folder))
    app, scans, attend = application(session), [], dualform.Dual.attend
    monkeypatch.setattr(
        dualform.Dual, "attend", lambda self, x, **more: (scans.append(len(x)), attend(self, x, **more))[1]
    )

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            asked = [
                client.get("/api/sources", params={"input": f"test:{number}", "layer": layer})
                for number in range(20)
                for layer in ("0", "2", "4")
            ]
            return await asyncio.gather(*asked)

    found = asyncio.run(ask())
    assert [one.status_code for one in found] == [200] * 60
    assert len(scans) < 30
    assert max(scans) > 1
    alone = Client(application(Session(find(folder))))
    for number in (0, 7, 19):
        expected = alone.get("/api/sources", input=f"test:{number}", layer="2")
        together = found[3 * number + 1].json()
        assert [one["key"] for one in together["highest"]] == [one["key"] for one in expected["highest"]]
        weights = [one["weight"] for one in expected["highest"]]
        assert [one["weight"] for one in together["highest"]] == pytest.approx(weights, rel=1e-5)
