"""docs/trained-models.md: its code runs as it stands, its numbers are those that were measured."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import dualform
import keeps
import trained_models
from pages import code_blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trained-models.md"
TEXT = PAGE.read_text()
DIGITS = TEXT.split("### A CNN and a Transformer")[0]
RESULTS = json.loads((ROOT / "bench" / "results" / "trained-models.json").read_text())


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the blocks leave behind, after the data and the network of docs/start.md and two checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        found = {}
        exec(code_blocks(ROOT / "docs" / "start.md")[0], found)
        model = found["model"]
        for step, (images, labels, _) in enumerate(found["loader"]):
            if step == 30:
                torch.save(model.state_dict(), "early.pt")
            found["optimizer"].zero_grad()
            found["cross_entropy"](model(images), labels).backward()
            found["optimizer"].step()
        torch.save(model.state_dict(), "late.pt")
        for block in code_blocks(PAGE):
            exec(block, found)
        found["recorder"].close()
        yield found


def test_the_code_runs(names, capsys):
    dual = names["dual"]
    assert dual.checkpoints["name"].to_list() == ["early.pt", "late.pt"]
    assert dual.influence(names["test_images"][:3]).top(3, by="sample_id").height == 9
    assert dualform.open("runs/finetuned").info()["initial"] == "pretrained"


def test_the_first_example_is_short():
    code = [
        line for line in code_blocks(PAGE)[0].splitlines() if line.strip() and not line.startswith(("import", "from"))
    ]
    assert len(code) <= 10


def test_every_number_of_the_tables_was_measured():
    found = {
        f"{row[name]:.3f}"
        for situation in RESULTS["lds"].values()
        if isinstance(situation, dict)
        for row in situation.values()
        for name in ("lds", "low", "high")
    }
    views = json.loads((ROOT / "bench" / "results" / "quality.json").read_text())["lds"]["digits-sgd"]["views"]
    found |= {
        f"{views[one][name]:.3f}"
        for one in ("kronfluence", "kronfluence-5", "kronfluence-damped")
        for name in ("lds", "low", "high")
    }
    quoted = re.findall(r"0\.\d{3}", DIGITS)
    assert len(quoted) == 36
    assert set(quoted) <= found
    percents = {
        f"{row[name]:.1%}"
        for what in ("whole", "last")
        for row in RESULTS["explained"][what]
        for name in ("by_first", "by_last", "by_all", "by_rows", "chance")
        if row[name] is not None
    }
    assert set(re.findall(r"\d+\.\d%", TEXT)) <= percents


def test_the_table_of_the_other_runs_was_measured():
    assert "\n".join(trained_models.table_of_others(RESULTS["others"], json.loads(keeps.RESULTS.read_text()))) in TEXT


def test_the_cost_was_measured():
    gpt, cnn = RESULTS["cost"].values()
    assert f"takes {gpt:.1f} times as long" in TEXT
    assert f"and {cnn:.1f} times (a CNN)" in TEXT
