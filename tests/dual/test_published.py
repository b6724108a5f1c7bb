"""The weights at the end of a recording, beside a published checkpoint."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from training import train


def test_a_training_that_was_run_again_has_the_published_weights(tmp_path, trained):
    save_file(trained.model.state_dict(), tmp_path / "w.safetensors")
    again = train(tmp_path / "again", chunk_bytes=2000)
    certificate = dualform.open(again.path).verify(checkpoint=tmp_path / "w.safetensors")
    assert certificate.passed
    assert certificate.published.is_equal
    assert set(certificate.published.frame["verdict"]) == {"equal"}
    assert f"all 4 weights are those of {tmp_path}/w.safetensors" in str(certificate)


def test_without_a_checkpoint_nothing_is_said(trained):
    assert trained.dual.verify().published is None


def test_how_much_they_differ(trained):
    weights = {name: value.clone() for name, value in trained.model.state_dict().items()}
    weights["0.weight"][0, 0] += 0.5
    published = trained.dual.verify(checkpoint=weights).published
    assert published.differing == ["0.weight"]
    row = next(row for row in published.frame.to_dicts() if row["parameter"] == "0.weight")
    assert row["largest"] == pytest.approx(0.5)
    assert row["difference"] == pytest.approx(0.5 / float(weights["0.weight"].norm()))
    moved = trained.model.state_dict()["0.weight"] - trained.checkpoints[0]["0.weight"]
    assert row["of_movement"] == pytest.approx(0.5 / float(moved.norm()))
    assert "0.weight: differs by" in str(published)
    assert "at most 5.0e-01 in one place" in str(published)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_published_in_fewer_bits(trained, dtype):
    weights = {name: value.to(dtype) for name, value in trained.model.state_dict().items()}
    published = trained.dual.verify(checkpoint=weights).published
    assert published.is_equal
    assert set(published.frame["verdict"]) == {f"equal in {str(dtype).removeprefix('torch.')}"}
    weights["2.bias"] = weights["2.bias"] * 1.01
    assert trained.dual.verify(checkpoint=weights).published.differing == ["2.bias"]


def test_names_that_only_one_has(trained):
    weights = dict(trained.model.state_dict())
    weights["other"] = weights.pop("2.bias")
    differences = trained.dual.verify(checkpoint=weights).published.differences()
    assert differences == {"2.bias": "not in the checkpoint", "other": "not in the recording"}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_with_the_prefix_of_a_wrapper(trained, prefix):
    weights = {prefix + name: value for name, value in trained.model.state_dict().items()}
    assert trained.dual.verify(checkpoint=weights).published.is_equal


def test_another_shape(trained):
    weights = {**trained.model.state_dict(), "2.bias": torch.zeros(7)}
    assert trained.dual.verify(checkpoint=weights).published.differences() == {"2.bias": "it has another shape"}


def test_a_tied_weight_is_published_under_one_name(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(5, 5, bias=False)
            self.two = nn.Linear(5, 5, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x).tanh())[:, :4]

    run = train(tmp_path / "run", model=Tied().double())
    weights = {"one.weight": run.model.one.weight.detach()}
    assert run.dual.verify(checkpoint=weights).published.is_equal


def test_the_command(tmp_path, trained):
    weights = {name: value.clone() for name, value in trained.model.state_dict().items()}
    torch.save({"state_dict": weights}, tmp_path / "same.pt")
    torch.save({**weights, "2.bias": weights["2.bias"] + 1}, tmp_path / "other.pt")
    call = CliRunner().invoke
    same = call(app, ["verify", str(trained.path), "--checkpoint", str(tmp_path / "same.pt")], env={"COLUMNS": "200"})
    assert same.exit_code == 0, same.output
    assert "All 4 weights are those of" in same.stdout
    other = call(app, ["verify", str(trained.path), "--checkpoint", str(tmp_path / "other.pt")], env={"COLUMNS": "200"})
    assert other.exit_code == 1
    assert "1 of 4 weights are not those of" in other.stdout
    assert "of what training changed" in other.stdout
    told = call(app, ["verify", str(trained.path), "--checkpoint", str(tmp_path / "other.pt"), "--json"])
    verdicts = {row["parameter"]: row["verdict"] for row in json.loads(told.stdout)["published"]}
    assert verdicts == {"0.weight": "equal", "0.bias": "equal", "2.weight": "equal", "2.bias": "differs"}
    missing = call(app, ["verify", str(trained.path), "--checkpoint", str(tmp_path / "none.pt")])
    assert missing.exit_code == 2
    assert "there is no such checkpoint" in missing.stderr
