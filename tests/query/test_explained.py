"""How much of the movement between checkpoints collected gradients explain."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.errors import NotRecordedError, QuestionError
from training import SAMPLES, network, samples


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_gradients(model):
    model.zero_grad()
    loss_fn(model, samples()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def moved(model, gradients, scale):
    """The state after a step against some gradients."""
    return {name: value - scale * gradients[name] for name, value in model.state_dict().items()}


def collected(path, states, batch=5):
    """Batches of 5, 5 and 2: they do not count alike."""
    loader = DataLoader(TensorDataset(*samples()), batch_size=batch)
    return dualform.open(dualform.collect(network(), loader, loss_fn, path, checkpoints=states), network())


def line(found, parameter):
    return next(row for row in found.frame.to_dicts() if row["parameter"] == parameter)


def test_a_step_of_gradient_descent_is_explained_whole(tmp_path):
    model = network()
    found = collected(tmp_path / "run", [model.state_dict(), moved(model, mean_gradients(model), 0.3)]).explained()
    assert found.frame["by_first"].to_list() == pytest.approx([1.0] * 5, abs=1e-12)
    assert found.frame["residual"].max() < 1e-6
    scales = found.scales.filter(found.scales["checkpoint"] == 0)["scale"].to_list()
    by_last = found.scales.filter(found.scales["checkpoint"] == 1)["scale"].to_list()
    assert scales == pytest.approx([0.3] * 4, abs=1e-6)
    assert by_last == pytest.approx([0.0] * 4, abs=1e-6)


def test_fractions_are_those_of_plain_least_squares(tmp_path):
    models = [network(seed=seed) for seed in range(3)]
    found = collected(tmp_path / "run", [model.state_dict() for model in models]).explained()
    gradients = [mean_gradients(model) for model in models]
    for name in gradients[0]:
        movement = (models[2].state_dict()[name] - models[0].state_dict()[name]).flatten()
        columns = torch.stack([one[name].flatten() for one in gradients], 1)
        row = line(found, name)
        assert row["movement"] == pytest.approx(float(movement.norm()))
        for what, chosen in (("by_first", columns[:, :1]), ("by_last", columns[:, -1:]), ("by_all", columns)):
            solution = torch.linalg.lstsq(chosen, movement[:, None]).solution
            rest = (movement[:, None] - chosen @ solution).norm()
            assert row[what] == pytest.approx(1 - float(rest / movement.norm()) ** 2, rel=1e-8)
        assert row["residual"] == pytest.approx(float(rest), rel=1e-8)
    total = sum(row["movement"] ** 2 * row["by_all"] for row in found.frame.to_dicts()[:-1])
    everything = line(found, "all parameters")
    assert everything["by_all"] == pytest.approx(total / everything["movement"] ** 2)


def gradients_of_rows(model, name):
    found = []
    inputs, labels = samples()
    for place in range(SAMPLES):
        model.zero_grad()
        loss_fn(model, (inputs[place : place + 1], labels[place : place + 1])).backward()
        found.append(model.get_parameter(name).grad.flatten().clone())
    return torch.stack(found, 1)


def test_row_by_row_it_is_plain_ridge_regression(tmp_path):
    models = [network(seed=seed) for seed in range(2)]
    found = collected(tmp_path / "run", [model.state_dict() for model in models]).explained()
    for name in ("0.weight", "2.weight"):
        columns = gradients_of_rows(models[0], name)
        movement = (models[1].state_dict()[name] - models[0].state_dict()[name]).flatten()
        ridge = 1e-3 * float(columns.square().sum(0).mean())
        hat = columns @ torch.linalg.solve(columns.T @ columns + ridge * torch.eye(SAMPLES).double(), columns.T)
        rest = movement - hat @ movement
        row = line(found, name)
        assert row["by_rows"] == pytest.approx(1 - float(rest.norm() / movement.norm()) ** 2, rel=1e-6)
        # Of a random movement: the mean over all directions
        unexplained = torch.eye(len(hat)).double() - hat
        assert row["chance"] == pytest.approx(1 - float(unexplained.square().sum()) / len(hat), rel=1e-6)
    assert line(found, "0.bias")["by_rows"] is None


def test_what_row_gradients_wrote_is_explained(tmp_path):
    """With other scales than the mean's: nearly all is explained row by row, more than by the mean."""
    model = network()
    scales = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0)).double()
    state = model.state_dict()
    state["0.weight"] = state["0.weight"] + (gradients_of_rows(model, "0.weight") @ scales).reshape(7, 5)
    row = line(collected(tmp_path / "run", [model.state_dict(), state]).explained(), "0.weight")
    assert row["by_rows"] > 0.98
    assert row["by_first"] < 0.9
    assert row["chance"] < 0.5


def test_only_some_checkpoints(tmp_path):
    dual = collected(tmp_path / "run", [network(seed=seed).state_dict() for seed in range(3)])
    found = dual.explained(1, rows=False)
    assert (found.first, found.last) == ("checkpoint 1", "checkpoint 2")
    assert found.frame["by_rows"].null_count() == found.frame.height
    assert found.scales["checkpoint"].unique().sort().to_list() == [1, 2]


@pytest.mark.parametrize(("first", "last"), [(1, 0), (0, 0), (-1, -1), (3, -1), (0, 3), (-4, 2)])
def test_other_checkpoints_are_refused(tmp_path, first, last):
    dual = collected(tmp_path / "run", [network(seed=seed).state_dict() for seed in range(3)])
    with pytest.raises(QuestionError, match="expected"):
        dual.explained(first, last)


def test_it_needs_two_checkpoints(tmp_path, trained):
    with pytest.raises(QuestionError, match=r"has 1\. Collect at two or more"):
        collected(tmp_path / "run", [network().state_dict()]).explained()
    with pytest.raises(NotRecordedError, match=r"verify\(\) says what its slots explain"):
        trained.dual.explained()


def test_convolutions_and_normalisations(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 3)).double()
    inputs, labels = torch.randn(6, 1, 4, 4).double(), torch.arange(6) % 3
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=4)
    loss_fn(model, (inputs, labels)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    states = [model.state_dict(), moved(model, gradients, 0.1)]
    path = dualform.collect(model, loader, loss_fn, tmp_path / "run", checkpoints=states)
    found = dualform.open(path, model).explained()
    assert found.frame["by_first"].to_list() == pytest.approx([1.0] * 7, abs=1e-9)
    assert line(found, "0.weight")["by_rows"] > 0.9


def test_the_command(tmp_path):
    path = collected(tmp_path / "run", [network(seed=seed).state_dict() for seed in range(2)]).store.location
    printed = CliRunner().invoke(app, ["explained", path], env={"COLUMNS": "160"})
    assert printed.exit_code == 0
    assert "Movement from 'checkpoint 0' to 'checkpoint 1'" in printed.stdout
    assert "all parameters" in printed.stdout
    answer = json.loads(CliRunner().invoke(app, ["explained", path, "--no-rows", "--json"]).stdout)
    assert [row["parameter"] for row in answer["parameters"]][-1] == "all parameters"
    text = str(dualform.open(path).explained())
    assert "by rows (chance)" in text
