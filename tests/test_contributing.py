"""CONTRIBUTING: its example of a new layer type, followed word by word, and the files it names."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from dualform.layers import rules

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


@pytest.mark.parametrize(
    ("heading", "room"), [("The walk of a slot in", "record"), ("The walk of a slot out", "query")]
)
def test_a_walk_passes_at_most_twelve_files_and_all_of_them_exist(heading, room):
    package = Path(dualform.__file__).parent
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    files = re.findall(r"\d+\. `([\w/]+\.py)`", section)
    assert 1 < len(files) <= 12
    for file in files:
        assert (package / file).exists() or (package / room / file).exists(), file
