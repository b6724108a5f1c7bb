"""Which rows are which: a wrong name would leave every sum right."""

import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.errors import BatchError
from recorded_samples import record, slot_frame
from training import assert_exact, sgd


class Sequences(nn.Module):
    """Runs linear maps over sequences; `arrange` brings the input into the shape they see."""

    def __init__(self, arrange):
        super().__init__()
        self.arrange = arrange
        self.map = nn.Linear(3, 2)

    def forward(self, x):
        return self.map(self.arrange(x))


def sequences(rows, positions, *, first="rows"):
    """Vectors that say whose they are: (row, position, 1)."""
    row, position = torch.meshgrid(torch.arange(rows), torch.arange(positions), indexing="ij")
    x = torch.stack([row, position, torch.ones_like(row)], dim=-1).double()
    return x if first == "rows" else x.transpose(0, 1).contiguous()


def step_once(path, arrange, inputs, rows, model=None, **settings):
    torch.manual_seed(0)
    model = Sequences(arrange).double() if model is None else model
    optimizer = sgd(model)
    with record(model, path, optimizer, **settings) as recorder:
        recorder.batch(sample_id=torch.arange(rows) + 100)
        model(inputs).square().sum().backward()
        optimizer.step()
    return dualform.open(path, model)


def assert_every_slot_has_its_own_name(dual, positions):
    slots = slot_frame(dual, "map")
    keys = dual.layer("map").keys
    assert keys[:, 0].tolist() == [name - 100 for name in slots["sample_id"].to_list()]
    assert slots["slot_position"].max() == positions - 1
    assert_exact(dual)


def as_it_is(x):
    return x


def flatten(x):
    return x.reshape(-1, 3)


def flatten_and_change(x):
    return x.reshape(-1, 3) * 1.0


def turn_and_flatten(x):
    return x.transpose(0, 1).reshape(-1, 3)


@pytest.mark.parametrize("positions", [3, 4])  # 4: sequences as long as the batch
@pytest.mark.parametrize(
    "arrange",
    [
        as_it_is,
        flatten,
        flatten_and_change,
        turn_and_flatten,
        lambda x: x.transpose(0, 1),
        lambda x: x.unsqueeze(2),
        lambda x: x.transpose(0, 1).unsqueeze(1),
    ],
)
def test_rows_are_found_wherever_the_model_puts_them(tmp_path, arrange, positions):
    dual = step_once(tmp_path / "run", arrange, sequences(4, positions), 4)
    assert_every_slot_has_its_own_name(dual, positions)


@pytest.mark.parametrize("arrange", [as_it_is, flatten, flatten_and_change, lambda x: x.reshape(3, 1, 4, 3)])
def test_an_axis_other_than_the_first_is_not_taken_by_its_length(tmp_path, arrange):
    inputs = sequences(4, 3, first="positions")
    with pytest.raises(BatchError, match=r"announced 4 rows.*shapes \(3, 4, 3\).*record\(…, batch_axis=1\)"):
        step_once(tmp_path / "refused", arrange, inputs, 4)
    dual = step_once(tmp_path / "run", arrange, inputs, 4, batch_axis=1)
    assert_every_slot_has_its_own_name(dual, 3)


@pytest.mark.parametrize(
    ("arrange", "first", "positions", "axis"),
    [
        (as_it_is, "positions", 4, 1),
        (as_it_is, "rows", 4, 0),
        (flatten, "positions", 3, 1),
        (turn_and_flatten, "rows", 3, 1),
        (flatten, "rows", 3, 0),
    ],
)
def test_the_user_says_where_the_rows_are(tmp_path, arrange, first, positions, axis):
    inputs = sequences(4, positions, first=first)
    dual = step_once(tmp_path / "run", arrange, inputs, 4, batch_axis={"map": axis})
    assert_every_slot_has_its_own_name(dual, positions)


class Heads(nn.Module):
    """Flattened heads: (rows, positions, heads × 3) → (rows × positions × heads, 3)."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 2)

    def forward(self, x):
        rows, positions, width = x.shape
        return self.map(x.reshape(rows * positions * (width // 3), 3)).reshape(rows, positions, -1)


def test_axes_are_counted_from_the_front(tmp_path):
    with pytest.raises(dualform.errors.RecordingError, match=r"batch_axis=\{'map': -3\}.*from the front"):
        step_once(tmp_path / "run", as_it_is, sequences(4, 4), 4, batch_axis={"map": -3})


def test_flattened_heads(tmp_path):
    inputs = sequences(4, 5).repeat(1, 1, 2)  # two heads, each with its row's number first
    torch.manual_seed(0)
    dual = step_once(tmp_path / "run", None, inputs, 4, model=Heads().double())
    assert_every_slot_has_its_own_name(dual, 10)


def test_a_column_for_each_position(tmp_path):
    torch.manual_seed(0)
    model = Sequences(as_it_is).double()
    optimizer = sgd(model)
    inputs = sequences(4, 3, first="positions")
    with record(model, tmp_path / "run", optimizer, batch_axis=1) as recorder:
        recorder.batch(sample_id=range(4), token=[[f"{r}/{p}" for p in range(3)] for r in range(4)])
        model(inputs).square().sum().backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    slots, keys = slot_frame(dual, "map"), dual.layer("map").keys
    assert slots["token"].to_list() == [f"{int(row)}/{int(position)}" for row, position, _ in keys.tolist()]
    found = dual.attend(inputs, rows=4)["map"].total("token", where=pl.col("token") == "2/1")
    assert found.filter(pl.col("total") != 0)["token"].unique().to_list() == ["2/1"]
