"""A run of two ranks at an address."""

import pytest

import dualform
from object_server import ObjectServer
from parallel_training import Case, network, on_two_ranks, samples

pytest.importorskip("obstore", reason="obstore is not installed")


def answers(place, case):
    inputs, _ = samples(case)
    dual = dualform.open(place, network(case))
    contributions = dual.contributions(inputs[:2], target=1).total("visit")
    by_label = dual.contributions(inputs[:2], target=1).total("label")
    top = dual.attend(inputs[:2])["0"].top(3)
    influence = dual.influence(inputs[:2], target=1).total("visit")
    return [
        dual.verify().to_json(),
        dual.rows.write_json(),
        *(one.write_json() for one in (contributions, by_label, top, influence)),
    ]


def test_a_run_of_two_ranks(ranks, monkeypatch, tmp_path):
    case = Case(chunk_bytes=1500)
    ranks.run(on_two_ranks, case, tmp_path / "run")
    dualform.build_totals(tmp_path / "run", "label")
    expected = answers(tmp_path / "run", case)
    with ObjectServer() as server:
        for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT", server.endpoint)):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
        dualform.copy(tmp_path / "run", "s3://bucket/run")
        assert [request.path for request in server.requests if request.method == "PUT"][-1] == "/bucket/run/run.json"
        is_same = answers("s3://bucket/run", case) == expected
        assert is_same
        dualform.copy("s3://bucket/run", tmp_path / "back")
        dualform.copy(f"{server.endpoint}/bucket/run", tmp_path / "from the web")
    for name in ("back", "from the web"):
        is_same = answers(tmp_path / name, case) == expected
        assert is_same, name
