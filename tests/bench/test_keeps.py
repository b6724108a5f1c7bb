"""bench/keeps.py: its table is the one in docs/scale.md, and its ground truth is read from the file that is kept."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import keeps
from dualform.evaluate.lds import Truth

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()
RESULTS = json.loads(keeps.RESULTS.read_text())


def test_the_page_has_the_table_of_the_results():
    assert keeps.table(RESULTS) in PAGE


@pytest.mark.parametrize("run", keeps.RUNS)
def test_every_run_has_every_keep(run):
    measured = RESULTS["runs"][run]["keeps"]
    assert {keep.partition("-")[0] for keep in measured} == {"slots", "rows", "projected", "keys", "totals"}
    assert measured["slots"]["whitened"]["of_slots"]["value"] == 1


@pytest.mark.parametrize("run", keeps.RUNS)
def test_the_truth_foretells_itself(run):
    kept = json.loads(keeps.TRUTHS.read_text())[run]
    outcomes = torch.tensor(kept["mean_outcomes"], dtype=torch.float64)
    assert outcomes.shape == (RESULTS["runs"][run]["subsets"], RESULTS["runs"][run]["examples"])
    # Each subset is a sample of its own, so that the sums of scores are the outcomes themselves
    truth = Truth(torch.eye(len(outcomes), dtype=torch.bool), outcomes.unsqueeze(0))
    assert float(truth.lds(outcomes.T).by_example.mean()) == pytest.approx(1)


def test_new_results_leave_what_was_measured_of_other_keeps():
    old = {"keeps": {"slots": {"disk": 1}, "rows": {"disk": 2}}, "ceiling": 0.5}
    keeps._merge(old, {"keeps": {"rows": {"disk": 3}}})
    assert old == {"keeps": {"slots": {"disk": 1}, "rows": {"disk": 3}}, "ceiling": 0.5}
