"""A run of two ranks, in a folder and at an address, asked by tasks that are sent to other processes."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from polars.testing import assert_frame_equal

import dualform
from dualform.query import scan, search
from parallel_training import Case, network, on_two_ranks, samples


def test_a_run_of_two_ranks(ranks, monkeypatch, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(scan, "TASK_BYTES", 1)
    monkeypatch.setattr(search, "USE_INDEX", False)
    case = Case(chunk_bytes=1500)
    ranks.run(on_two_ranks, case, tmp_path / "run")
    inputs, _ = samples(case)
    here = dualform.open(tmp_path / "run", network(case))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for place in (tmp_path / "run", f"file://{tmp_path}/run"):
            there = dualform.open(place, network(case), executor=pool)
            for ask in (
                lambda dual: dual.attend(inputs[:2])["0"].top(3),
                lambda dual: dual.contributions(inputs[:2], target=1)["0"].top(5, per="visit"),
                lambda dual: dual.influence(inputs[:2], target=1).total("visit"),
            ):
                assert_frame_equal(ask(there), ask(here), check_exact=True)
