"""CONTRIBUTING: its example of a new layer type, followed word by word, and the files that a slot passes."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from dualform.layers import rules
from training import samples, train

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Bilinear(3, 2, 4)

    def forward(self, x):
        return self.product(x[:, :3], x[:, 3:])


def test_a_new_layer_type_is_two_functions_and_a_line(tmp_path, monkeypatch):
    code, line = (
        re.search(r"```python\n(def _bilinear.*?)```", TEXT, re.S)[1],
        re.search(r"`nn.Bilinear: (Rule\(.*?\))`", TEXT)[1],
    )
    names = dict(vars(rules))
    exec(code, names)
    monkeypatch.setitem(rules.RULES, nn.Bilinear, eval(line, names))
    torch.manual_seed(0)
    model, x = Products().double(), torch.randn(20, 5, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64") as recorder:
        for ids in torch.arange(20).repeat(3).split(6):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            model(x[ids]).square().sum().backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.verify().passed
    parts = dual.contributions(x[:3], target=1)["product"].parts()
    torch.testing.assert_close(
        torch.from_numpy(parts["initial"].to_numpy() + parts["slots"].to_numpy()), model(x[:3])[:, 1].detach()
    )


PACKAGE = Path(dualform.__file__).parent


def walk(title, room):
    """The files that a section numbers, by their paths in the package."""
    section = re.search(rf"## {title}\n(.*?)\n## ", TEXT, re.S)[1]
    names = re.findall(r"\d+\. `([\w/]+\.py)`", section)
    return [name if "/" in name else f"{room}/{name}" for name in names]


@pytest.mark.parametrize(("title", "room"), [("The walk of a slot in", "record"), ("The walk of a slot out", "query")])
def test_a_slot_passes_twelve_files_at_most(title, room):
    files = walk(title, room)
    assert 10 <= len(files) <= 12
    assert [name for name in files if not (PACKAGE / name).is_file()] == []


def test_the_files_of_where_is_are_there():
    section = re.search(r"## Where is …\?\n(.*?)\n## ", TEXT, re.S)[1]
    paths = re.findall(r"`((?:\w+/)+\w+\.py)`", section)
    assert len(paths) > 15
    assert [path for path in paths if not (PACKAGE / path).is_file()] == []


def test_the_walk_out_names_the_files_that_run(tmp_path):
    run = train(tmp_path / "run")
    inputs = samples()[0][:2]
    visited = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            visited.add(path.relative_to(PACKAGE).as_posix())

    dual = run.dual
    sys.setprofile(note)
    try:
        dual.attend(inputs)["2"].total("label", where="label = 1")
    finally:
        sys.setprofile(None)
    # Beside the walk: what the model's weights are, what SQL means, the dictionary that answers come in, and where tasks run
    beside = {"executors.py", "network.py", "info.py", "sql.py", "by_layer.py"}
    in_query = {name for name in visited if name.startswith("query/") and Path(name).name not in beside}
    listed = walk("The walk of a slot out", "query")
    assert in_query <= set(listed)
    assert set(listed) <= visited
