"""Counts of campaigns, kept by the version of the code."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from campaigns import results


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two files."""
    monkeypatch.setattr(results, "PACKAGE", tmp_path / "package")
    (tmp_path / "package" / "store").mkdir(parents=True)
    (tmp_path / "package" / "store" / "a.py").write_text("a = 1\n")
    (tmp_path / "package" / "other.py").write_text("b = 1\n")
    return tmp_path / "package"


def test_a_change_of_the_sources_is_another_version(package):
    before = results.code_version(["store"])
    (package / "other.py").write_text("b = 2\n")
    assert results.code_version(["store"]) == before
    (package / "store" / "a.py").write_text("a = 2\n")
    assert results.code_version(["store"]) != before


def test_a_sentence_or_a_line_break_is_no_other_version(package):
    before = results.code_version(["store"])
    (package / "store" / "a.py").write_text('"""A file."""\n\n# why\na = (\n    1\n)\n"""What it is."""\n')
    assert results.code_version(["store"]) == before


def test_counts_add_up_for_a_version_and_start_anew_for_another(package, tmp_path):
    one = results.Results("kill", "kills", tmp_path, ["store"])
    one.add({"kills": 2}, [], 1.0)
    results.Results("kill", "kills", tmp_path, ["store"]).add({"kills": 3, "failures": 1}, ["why"], 1.5)
    assert one.counts() == {"kills": 5, "failures": 1}
    (package / "store" / "a.py").write_text("a = 2\n")
    assert results.Results("kill", "kills", tmp_path, ["store"]).counts() == {}
    data = json.loads((tmp_path / "torture-kill.json").read_text())
    assert data["versions"][one.version]["seconds"] == 2.5
    assert data["versions"][one.version]["failures"] == ["why"]


def test_no_case_is_claimed_twice(package, tmp_path):
    one, other = (results.Results("kill", "kills", tmp_path, ["store"]) for _ in range(2))
    assert list(one.claim(seed=0, cases=2)) == [0, 1]
    assert list(other.claim(seed=0, cases=2)) == [2, 3]
    assert list(one.claim(seed=1, cases=1)) == [0]
