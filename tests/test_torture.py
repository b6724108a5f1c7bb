"""A few cases of each campaign of `make torture`; and the page with their counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import reliability  # noqa: E402


def run(campaign, count, results):
    """Run some cases; gives what was counted."""
    command = [sys.executable, BENCH / "torture.py", campaign, "--count", str(count), "--results", str(results)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    data = json.loads((results / f"torture-{campaign}.json").read_text())
    (version,) = data["versions"].values()
    return version["counts"]


def test_killed_anywhere_nothing_sealed_is_lost(tmp_path):
    counts = run("kill", 8, tmp_path)
    assert counts["kills with sealed steps"] >= 0.8 * counts["kills"]


def test_damaged_bytes_are_refused_or_harmless(tmp_path):
    counts = run("mutate", 1000, tmp_path)
    assert counts["flip bit: StoreDamagedError"] > 300


def test_the_page_has_the_counts_of_the_results():
    text = reliability.PAGE.read_text()
    assert reliability.page(text) == text, "run: python bench/reliability.py"


@pytest.fixture
def results(tmp_path):
    """Results of three versions of the code."""
    version = {"dualform": "0.1.0", "first": "2026-01-01", "seconds": 7200.0, "claimed": {"0": 3}, "failures": []}
    explained = {"seed 0, case 7": "the disk of the test was full"}
    versions = {
        "first": {**version, "last": "2026-01-01", "counts": {"kills": 9}},
        "most": {**version, "last": "2026-01-02", "counts": {"kills": 1234, "failures": 1}, "explained": explained},
        "new": {**version, "last": "2026-01-03", "counts": {"kills": 10, "during seal": 7}},
    }
    data = {"campaign": "kill", "unit": "kills", "sources": [], "versions": versions}
    (tmp_path / "torture-kill.json").write_text(json.dumps(data))
    return tmp_path


def test_the_page_shows_the_versions_that_were_tested_last_and_most(results):
    lines = reliability.counts(results).splitlines()
    new = lines.index("| Kills | 10 kills | 0 | 0 | 2.0 | 2026-01-03 | `new` of 0.1.0 |")
    assert lines[new + 1] == "| Kills | 1,234 kills | 1 | 1 | 2.0 | 2026-01-02 | `most` of 0.1.0 |"
    assert not any("`first`" in line for line in lines)
    assert "**Kills**: during seal 7." in lines
    assert "- seed 0, case 7: the disk of the test was full" in lines
    assert "| Losses of power | not run yet | | | | | |" in lines
