"""Whose slot is it? Names of rows in recordings: a wrong one would leave every sum right."""

import importlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.errors import AxisError, BatchError, RecordingError


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def named_slots(path, layer):
    """The sample_id of each slot of a layer, None where it has no row, and its keys."""
    dual = dualform.open(path)
    rows = dual.slots(layer)["row"].to_list()
    ids = dual.rows["sample_id"].to_list()
    return [None if row is None or row < 0 else ids[row] for row in rows], dual.layer(layer).keys


# Random arrangements

ARRANGEMENTS = {
    "as it is": lambda x: x,
    "turned": lambda x: x.transpose(0, 1),
    "flattened": lambda x: x.flatten(0, 1),
    "turned and flattened": lambda x: x.transpose(0, 1).flatten(0, 1),
    "flattened copy": lambda x: x.flatten(0, 1) * 1.0,
    "one more axis": lambda x: x.unsqueeze(1),
    "axes around": lambda x: x.unsqueeze(0).unsqueeze(2),
    "twice": lambda x: torch.cat([x, x.flip(1)]),
    "each row twice": lambda x: x.repeat_interleave(2, 0),
    "windows": lambda x: x.unflatten(1, (2, -1)).flatten(0, 1),
    "windows beside each other": lambda x: x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1),
    "first position": lambda x: x[:, 0],
    "mean over positions": lambda x: x.mean(1),
    "turned and copied": lambda x: x.permute(1, 0, 2).contiguous(),
    "sorted": lambda x: x.flatten(0, 1)[x[..., 1:].flatten(0, 1).sum(1).argsort()],
    "rows in another order": lambda x: x.roll(1, 0),
    "nothing of the rows": lambda x: torch.eye(x.shape[-1], dtype=x.dtype),
}


class Arranged(nn.Module):
    """A linear map for each arrangement of the same input, whose vectors say whose they are: their first entry is the row."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        self.maps = nn.ModuleList([nn.Linear(4, 2) for _ in names])

    def forward(self, x):
        return sum(m(ARRANGEMENTS[n](x)).square().sum() for n, m in zip(self.names, self.maps, strict=True))


@pytest.mark.parametrize("seed", range(200))
def test_no_slot_of_a_random_arrangement_has_a_wrong_name(tmp_path, seed):
    """Rows are found, or the slot has no row, or the step asks; a name that is given is the right one."""
    choose = random.Random(seed)
    rows = choose.randint(2, 6)
    positions = choose.choice([rows, 2 * rows, 2, 4, 6])
    positions += positions % 2
    names = choose.sample(sorted(ARRANGEMENTS), 3)
    torch.manual_seed(seed)
    inputs = torch.randn(rows, positions, 4, dtype=torch.float64)
    inputs[..., 0] = torch.arange(rows).unsqueeze(1)
    model = Arranged(names).double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", on_unclear_rows="leave out") as recorder:
        recorder.batch(sample_id=torch.arange(rows) + 100)
        model(inputs).backward()
        optimizer.step()
    unnamed = {"sorted", "nothing of the rows", "rows in another order"}
    for number, name in enumerate(names):
        ids, keys = named_slots(tmp_path / "run", f"maps.{number}")
        if name in unnamed:
            assert set(ids) == {None}, name
            continue
        assert [one - 100 for one in ids] == keys[:, 0].round().long().tolist(), name
    assert dualform.open(tmp_path / "run").verify().passed


# Which batch() call a forward pass belongs to


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 4))


def test_micro_batches_under_one_batch_call(tmp_path):
    """14 rows are announced once, and come as two micro-batches of shape (7, 14): the second axis fits by accident."""
    model = classifier()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(14))
        for _ in range(2):
            model(torch.randint(0, 9, (7, 14))).square().mean().backward()
        with pytest.raises(BatchError, match=r"14 rows.*\(7, 14\).*before each micro-batch"):
            optimizer.step()


def test_a_second_forward_pass_with_another_number_of_rows(tmp_path):
    model = classifier()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(6))
        (model(torch.randint(0, 9, (6, 3))).sum() + model(torch.randint(0, 9, (4, 3))).sum()).backward()
        with pytest.raises(BatchError, match=r"announced 6 rows.*\(4, 3\) \(the 2\. forward pass since that call\)"):
            optimizer.step()


def test_batches_that_are_announced_ahead_of_the_training(tmp_path):
    """A data collator sees micro-batches before the forward passes that run them."""
    model = classifier()
    with dualform.record(model, sgd(model), tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(4))
        with pytest.raises(BatchError, match=r"called again before a forward pass used.*not in a data collator"):
            recorder.batch(sample_id=range(4, 8))


def test_a_forward_pass_that_does_not_count_may_have_any_rows(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(5))
            optimizer.zero_grad()
            model(torch.randn(5, 3)).sum().backward()
            saliency = torch.randn(2, 3, requires_grad=True)
            torch.autograd.grad(model(saliency).sum(), saliency)
            optimizer.step()
    assert dualform.open(tmp_path / "run").verify().passed


# Training stays the same


class Sensitive(nn.Module):
    """Would train otherwise after a forward pass that should not have been: dropout, statistics, counters, random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.drop(self.norm(self.first(x))) * (1 + 0.01 * self.calls)
        return self.second(x + 0.1 * torch.randn_like(x) + 0.1 * random.random() + 0.1 * float(np.random.rand()))


def trained(path, **settings):
    for module in (random, np.random):
        module.seed(0)
    torch.manual_seed(0)
    model = Sensitive()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data, labels = torch.randn(26, 4), torch.arange(26) % 3
    recorder = dualform.record(model, optimizer, path, **settings) if path is not None else None
    for ids in torch.randperm(26).repeat(3).split(8):  # the last batch is shorter
        if recorder is not None:
            recorder.batch(sample_id=ids)
        optimizer.zero_grad()
        F.cross_entropy(model(data[ids]), labels[ids]).backward()
        optimizer.step()
    if recorder is not None:
        recorder.close()
    return model


def test_training_is_bitwise_the_same(tmp_path):
    plain = trained(None)
    for settings in ({}, {"check_rows": False}):
        recorded = trained(tmp_path / f"run{len(settings)}", **settings)
        for (name, one), other in zip(plain.state_dict().items(), recorded.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
        assert recorded.calls == plain.calls
        assert recorded.training


def test_few_experiments_do_for_batches_of_many_lengths(tmp_path, monkeypatch):
    module = importlib.import_module("dualform.record.forward_pass")
    made = []
    original = module.prove
    monkeypatch.setattr(module, "prove", lambda *args: made.append(1) or original(*args))
    model = classifier()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for length in range(2, 40):
            recorder.batch(sample_id=range(4))
            model(torch.randint(0, 9, (4, length))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(made) == 2, "one where sequences are as long as the batch, one for all others"


# What verify and info say


def test_verify_says_that_rows_are_proved(tmp_path):
    trained(tmp_path / "run")
    dual = dualform.open(tmp_path / "run")
    certificate = dual.verify()
    assert "rows: proved at step 0" in str(certificate)
    assert certificate.rows.to_dicts()[0] == {
        "layer": "first", "where": "axis 0", "proved": 0, "assumed": None, "why": ""
    }  # fmt: skip
    assert '"rows"' in certificate.to_json()
    assert dual.info()["row_evidence"]["second"] == "proved at step 0 (axis 0)"


def test_verify_says_why_rows_are_assumed(tmp_path):
    trained(tmp_path / "run", check_rows=False)
    dual = dualform.open(tmp_path / "run")
    assert "rows: assumed from step 0 on, because check_rows=False" in str(dual.verify())
    expected = "assumed from step 0 on, because check_rows=False (axis 0 by its length)"
    assert dual.info()["row_evidence"]["first"] == expected


def test_a_later_kind_of_batch_is_proved_again(tmp_path):
    """Later batches may have other shapes; here, another arrangement of the rows."""

    class Switches(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(3, 2)

        def forward(self, x):
            return self.map(x if x.shape[1] < 5 else x.transpose(0, 1).flatten(0, 1)).sum()

    model = Switches().double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for length in (3, 4, 6, 7):
            inputs = torch.randn(5, length, 3, dtype=torch.float64)
            inputs[..., 0] = torch.arange(5).unsqueeze(1)
            recorder.batch(sample_id=range(5))
            model(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    ids, keys = named_slots(tmp_path / "run", "map")
    assert ids == keys[:, 0].long().tolist()


# Without the proof, and where rows stay unclear


def test_without_the_check_only_the_first_axis_is_taken(tmp_path):
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 2))
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", check_rows=False) as recorder:
        recorder.batch(sample_id=range(4))
        model(torch.randn(4, 5, 3)).sum().backward()
        with pytest.raises(AxisError, match=r"layer '1' got 20 vectors.*batch_axis=\{'1': 0\}"):
            optimizer.step()


def test_unclear_rows_ask_or_are_left_out(tmp_path):
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(3, 2)

        def forward(self, x):
            return self.map(x[x[:, 0].argsort()])

    def train(path, **settings):
        model = Sorted()
        optimizer = sgd(model)
        with dualform.record(model, optimizer, path, **settings) as recorder:
            recorder.batch(sample_id=range(4))
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        return path

    with pytest.raises(AxisError, match=r"not clear.*does not follow the rows.*exclude=\['map'\].*leave out"):
        train(tmp_path / "asks")
    path = train(tmp_path / "left out", on_unclear_rows="leave out")
    assert set(named_slots(path, "map")[0]) == {None}
    assert dualform.open(path).verify().passed
    assert "not clear" in dualform.open(path).info()["row_evidence"]["map"]


def test_an_unknown_way_with_unclear_rows(tmp_path):
    with pytest.raises(RecordingError, match="on_unclear_rows='guess': expected one of 'ask', 'leave out'"):
        dualform.record(nn.Linear(2, 2), sgd(nn.Linear(2, 2)), tmp_path / "run", on_unclear_rows="guess")


def test_batch_axis_takes_patterns(tmp_path):
    model = nn.ModuleDict({"a1": nn.Linear(3, 3), "a2": nn.Linear(3, 2)}).double()
    optimizer = sgd(model)
    inputs = torch.randn(5, 4, 3, dtype=torch.float64)
    with dualform.record(model, optimizer, tmp_path / "run", batch_axis={"a*": 1}) as recorder:
        recorder.batch(sample_id=range(4))
        model["a2"](model["a1"](inputs)).sum().backward()
        optimizer.step()
    ids, keys = named_slots(tmp_path / "run", "a1")
    assert torch.equal(keys.reshape(4, 5, 3), inputs.transpose(0, 1))
    assert ids == [row for row in range(4) for _ in range(5)]


def test_layers_that_are_excluded(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", exclude="2") as recorder:
        recorder.batch(sample_id=range(4))
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run")
    assert dual.layers == ["0"]
    assert dual.info()["left_out"] == {"2": "exclude= names it"}
    with pytest.raises(RecordingError, match=r"exclude=\['7'\] names no layer that can be recorded"):
        dualform.record(model, sgd(model), tmp_path / "other", exclude=["7"])


def test_inputs_that_all_rows_share_have_no_row(tmp_path):
    """Position embeddings of shape (1, T) or (T,), also where sequences are as long as the batch."""

    class Positions(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(8, 4), nn.Linear(4, 9)
            self.shape = shape

        def forward(self, tokens):
            time = torch.arange(tokens.shape[1])
            return self.head(self.words(tokens) + self.places(time if self.shape == 1 else time.unsqueeze(0)))

    for shape in (1, 2):
        path = tmp_path / f"run{shape}"
        torch.manual_seed(0)
        model = Positions(shape)
        optimizer = sgd(model)
        with dualform.record(model, optimizer, path) as recorder:
            for rows, length in ((5, 5), (5, 7), (3, 5), (7, 7)):
                tokens = torch.randint(0, 9, (rows, length))
                recorder.batch(sample_id=range(rows))
                optimizer.zero_grad()
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
        assert set(named_slots(path, "places")[0]) == {None}
        assert None not in named_slots(path, "words")[0]
        dual = dualform.open(path, model)
        assert dual.verify().passed
        assert dual.info()["row_evidence"]["places"] == "proved at step 0 (shared by all rows)"
        found = dual.contributions(torch.randint(0, 9, (2, 5)), target=lambda output: output[:, -1, 3])["places"]
        assert found.parts().height == 2
