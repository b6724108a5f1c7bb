"""Whose slot is it? Names of rows in recordings: a wrong one would leave every sum right."""

import importlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
        with pytest.raises(BatchError, match=r"announced 6 rows.*\(4, 3\) in forward pass 2 since that call"):
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


class Counter:
    """A plain object with state."""

    def __init__(self):
        self.calls = 0


class KeepsTensor(nn.Module):
    """Its state is a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.map, self.mean = nn.Linear(4, 3), torch.zeros(4)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.map(x - self.mean)


class KeepsObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.map, self.counter = nn.Linear(4, 3), Counter()

    def forward(self, x):
        self.counter.calls += 1
        return self.map(x * (1 + 0.1 * self.counter.calls))


class KeepsGenerators(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 3)
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.torch) + float(self.numpy.random()) + self.python.random()
        return self.map(x + noise)


class MomentumEncoder(nn.Module):
    """Moves the weights of a second encoder in each forward pass, as MoCo does."""

    def __init__(self, in_place):
        super().__init__()
        self.map, self.slow, self.in_place = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False), in_place

    def forward(self, x):
        for slow, fast in zip(self.slow.parameters(), self.map.parameters(), strict=True):
            if self.in_place:
                slow.data.lerp_(fast.data, 0.1)
            else:
                slow.data = 0.9 * slow.data + 0.1 * fast.data
        return self.map(x) - self.slow(x)


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 3)

    def forward(self, x):
        return self.map(x.mul_(0.5).clone())


class HiddenPart(nn.Module):
    """Calls its parts by an object that is no module."""

    def __init__(self):
        super().__init__()
        self.map, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)
        self.parts = Counter()
        self.parts.norm = self.norm

    def forward(self, x):
        return self.map(self.parts.norm(x))


class ClassAttribute(nn.Module):
    """Calls a part by an attribute of its class, which copies share."""

    def __init__(self):
        super().__init__()
        self.map, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)
        type(self).shared = [self.norm]

    def forward(self, x):
        return self.map(self.shared[0](x))


def wrapped_forward():
    """Wrappers replace model.forward, and the new one holds the old one in its closure."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    original = model.forward
    model.forward = lambda x: 2 * original(x)
    return model


@pytest.mark.parametrize(
    "make",
    [
        KeepsTensor,
        KeepsObject,
        KeepsGenerators,
        lambda: MomentumEncoder(in_place=False),
        lambda: MomentumEncoder(in_place=True),
        ChangesItsInput,
        HiddenPart,
        ClassAttribute,
        wrapped_forward,
    ],
)
@pytest.mark.filterwarnings("ignore:not recorded")
def test_the_proof_has_no_effect_on_models_with_state(tmp_path, make):
    def train(path):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        recorder = dualform.record(model, optimizer, path) if path is not None else None
        for _ in range(3):
            x = torch.randn(5, 4)
            if recorder is not None:
                recorder.batch(sample_id=range(5))
            optimizer.zero_grad()
            (model(x).square().sum() + x.sum()).backward()
            optimizer.step()
            states.append(x.clone())
        if recorder is not None:
            recorder.close()
        return model

    states = []
    plain, recorded = train(None), train(tmp_path / "run")
    for (name, one), other in zip(plain.state_dict().items(), recorded.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert all(torch.equal(one, other) for one, other in zip(states[:3], states[3:], strict=True))


def test_what_cannot_be_tried_without_consequences_is_assumed(tmp_path):
    model = MomentumEncoder(in_place=True)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", exclude="slow") as recorder:
        recorder.batch(sample_id=range(4))
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    evidence = dualform.open(tmp_path / "run").info()["row_evidence"]["map"]
    assert "assumed from step 0 on, because running a copy of the model raised WouldChangeTrainingError" in evidence


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


# Models that arrange rows in unusual ways


def samples_of(rows, positions=5, first=0):
    """Vectors whose first feature is the sample's number."""
    inputs = torch.randn(rows, positions, 3)
    inputs[..., 0] = torch.arange(first, first + rows).unsqueeze(1)
    return inputs


class Arranged(nn.Module):
    def __init__(self, arrange):
        super().__init__()
        self.map, self.arrange = nn.Linear(3, 2), arrange

    def forward(self, *given, **named):
        return self.map(self.arrange(self, *given, **named))


def record_arranged(path, arrange, batches, **settings):
    """Train one step for each of some (arguments, rows); gives the dual."""
    model = Arranged(arrange)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with dualform.record(model, optimizer, path, **settings) as recorder:
        for arguments, rows in batches:
            recorder.batch(sample_id=range(rows))
            optimizer.zero_grad()
            model(*arguments[0], **arguments[1]).sum().backward()
            optimizer.step()
    return dualform.open(path)


def assert_named(path):
    ids, keys = named_slots(path, "map")
    assert ids == keys[:, 0].round().long().tolist()


def test_rows_that_are_shuffled_in_training_only(tmp_path):
    def arrange(model, x):
        return x[torch.randperm(len(x))] if model.training else x

    batches = [(((samples_of(4),), {}), 4)]
    with pytest.raises(AxisError, match="does not follow the rows along any axis"):
        record_arranged(tmp_path / "asks", arrange, batches)
    record_arranged(tmp_path / "run", arrange, batches, on_unclear_rows="leave out")
    assert set(named_slots(tmp_path / "run", "map")[0]) == {None}


def test_a_switch_among_the_arguments_that_changes_the_arrangement(tmp_path):
    """Sequences are as long as the batch, so shapes do not show it."""
    batches = [(((samples_of(4, 4),), {"turned": turned}), 4) for turned in (False, True)]
    record_arranged(tmp_path / "run", lambda _, x, turned: x.transpose(0, 1) if turned else x, batches)
    assert_named(tmp_path / "run")


def test_a_list_with_an_entry_for_each_row(tmp_path):
    batches = [((([*samples_of(4, 4)],), {}), 4)]
    dual = record_arranged(tmp_path / "run", lambda _, images: torch.stack(images), batches)
    assert_named(tmp_path / "run")
    assert dual.info()["row_evidence"]["map"] == "proved at step 0 (axis 0)"


def test_a_list_of_texts(tmp_path):
    batches = [(((["3", "1", "4", "15"],), {}), 4)]
    dual = record_arranged(
        tmp_path / "run", lambda _, texts: torch.tensor([[float(text), len(text), 1] for text in texts]), batches
    )
    assert dual.info()["row_evidence"]["map"] == "proved at step 0 (axis 0)"


def test_inputs_that_are_cut_to_the_longest_row(tmp_path):
    """Replacing the longest row changes all shapes; then other rows are replaced."""
    for longest in range(4):
        lengths = torch.ones(4, dtype=torch.int64)
        lengths[longest] = 5
        batches = [(((samples_of(4), lengths), {}), 4)]
        path = tmp_path / f"run{longest}"
        record_arranged(path, lambda _, x, lengths: x[:, : int(lengths.max())], batches)
        assert_named(path)


def test_one_infinite_feature_does_not_hide_the_rows(tmp_path):
    x = samples_of(4)
    x[1, 2, 2] = torch.inf
    dual = record_arranged(tmp_path / "run", lambda _, x: x, [(((x,), {}), 4)])
    assert dual.info()["row_evidence"]["map"] == "proved at step 0 (axis 0)"


def test_rows_that_are_sorted_in_later_batches(tmp_path):
    """All rows of the first batch are equally long, so sorting them by length changes nothing yet."""

    def arrange(_, x, lengths):
        return x[lengths.argsort(descending=True, stable=True)]

    equal, different = torch.full((4,), 5), torch.tensor([2, 5, 3, 4])
    batches = [(((samples_of(4), lengths), {}), 4) for lengths in (equal, different)]
    dual = record_arranged(tmp_path / "run", arrange, batches[:1])
    assert "order or select rows by their content (sort)" in dual.info()["row_evidence"]["map"]
    with pytest.raises(AxisError, match="does not follow the rows along any axis"):
        record_arranged(tmp_path / "asks", arrange, batches)


def test_positions_that_are_selected_by_a_mask(tmp_path):
    """As many vectors as a multiple of the rows, but not equally many of each."""

    def arrange(_, x, mask):
        return x[mask]

    every, some = torch.ones(4, 5, dtype=torch.bool), torch.ones(4, 5, dtype=torch.bool)
    some[0, :4] = False
    batches = [(((samples_of(4), mask), {}), 4) for mask in (every, some)]
    with pytest.raises(AxisError, match="layer 'map' got 16 vectors"):
        record_arranged(tmp_path / "run", arrange, batches)


def test_layers_that_only_see_zeros_at_first(tmp_path):
    """An adapter that starts at zero: where its rows are is found when they begin to differ."""

    batches = [(((samples_of(4), scale), {}), 4) for scale in (0.0, 1.0)]
    dual = record_arranged(tmp_path / "run", lambda _, x, scale: (x * scale).flatten(0, 1), batches)
    ids, _ = named_slots(tmp_path / "run", "map")
    assert set(ids[:20]) == {None}
    assert ids[20:] == [row for row in range(4) for _ in range(5)]
    evidence = dual.info()["row_evidence"]["map"]
    assert evidence.startswith("proved at step 1; assumed from step 0 on, because its input was the same for all rows")


def test_forward_passes_of_very_many_kinds(tmp_path, monkeypatch):
    """As of a model with many experts, of which each batch calls others."""
    proofs = importlib.import_module("dualform.layers.row_proof")
    monkeypatch.setattr(proofs, "MOST_KINDS", 3)
    finder = importlib.import_module("dualform.record.forward_pass")
    made = []
    original = finder.prove
    monkeypatch.setattr(finder, "prove", lambda *args: made.append(1) or original(*args))
    batches = [(((samples_of(4),), {"kind": f"kind {number}"}), 4) for number in range(8)]
    dual = record_arranged(tmp_path / "run", lambda _, x, kind: x.flatten(0, 1), batches)
    assert len(made) == 3
    ids, _ = named_slots(tmp_path / "run", "map")
    assert ids == 8 * [row for row in range(4) for _ in range(5)]
    evidence = dual.info()["row_evidence"]["map"]
    assert "assumed from step 3 on, because the model has run in more than 3 different ways" in evidence


def test_a_module_that_is_called_by_itself_with_other_rows(tmp_path):
    """A head that sees chosen positions only: its slots can be kept without a row."""

    def train(path, **settings):
        torch.manual_seed(0)
        model = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 2)})
        optimizer = sgd(model)
        with dualform.record(model, optimizer, path, **settings) as recorder:
            recorder.batch(sample_id=range(4))
            model["head"](model["body"](samples_of(4)).flatten(0, 1)[:12]).sum().backward()
            optimizer.step()
        return path

    with pytest.raises(BatchError, match=r"module 'head' was given.*flattened.*batch_axis=\{'head': 0\}.*leave out"):
        train(tmp_path / "asks")
    path = train(tmp_path / "run", on_unclear_rows="leave out")
    assert set(named_slots(path, "head")[0]) == {None}
    assert "(not clear)" in dualform.open(path).info()["row_evidence"]["head"]
    assert None not in named_slots(path, "body")[0]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_layers_under_reentrant_checkpointing_are_proved(tmp_path):
    class Checkpointed(Arranged):
        def __init__(self):
            super().__init__(None)
            self.first = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(lambda h: self.map(h.transpose(0, 1)), self.first(x), use_reentrant=True)

    model = Checkpointed()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(4))
        model(samples_of(4)).sum().backward()
        optimizer.step()
    assert dualform.open(tmp_path / "run").info()["row_evidence"]["map"] == "proved at step 0 (axis 1)"
    assert named_slots(tmp_path / "run", "map")[0] == [row for row in range(4) for _ in range(5)]


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


# Batches of equal rows, and of none


class Words(nn.Module):
    """An embedding, a body over three positions, and a head."""

    def __init__(self, body, *, dropout=0.0, places=False):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(6, 4), body, nn.Linear(4, 3)
        self.dropout = nn.Dropout(dropout)
        self.places = nn.Embedding(3, 4) if places else None

    def forward(self, words):
        x = self.words(words)
        if self.places is not None:
            x = x + self.places(torch.arange(3)[None])
        x = self.body(x)
        x = x[0] if isinstance(x, tuple) else x
        return self.head(self.dropout(x.mean(1)))


def train_on_words(path, model, batches):
    words = torch.randint(0, 6, (9, 3), generator=torch.Generator().manual_seed(0))
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for batch in batches:
            ids = torch.tensor(batch, dtype=torch.int64)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(words[ids]), ids % 3, reduction="sum").backward()
            optimizer.step()
    return dualform.open(path, model)


def test_rows_have_names_after_a_batch_of_equal_rows_under_dropout(tmp_path):
    torch.manual_seed(0)
    model = Words(nn.Linear(4, 4), dropout=0.3)
    dual = train_on_words(tmp_path / "run", model, [[0, 0], [1, 2], [3, 4]])
    assert dual.slots("head")["row"].null_count() == 0


def test_equal_rows_of_a_recurrent_layer_have_names(tmp_path):
    """Its own axis of the batch says whose they are, though no experiment can tell equal rows apart."""
    torch.manual_seed(0)
    train_on_words(tmp_path / "run", Words(nn.GRU(4, 4, batch_first=True)), [[0, 0], [1, 2], [3, 4]])
    names, _ = named_slots(tmp_path / "run", "body")
    assert names == [sample for sample in (0, 0, 1, 2, 3, 4) for _ in range(3)]


def test_rows_have_names_after_a_batch_of_equal_rows_before_a_batch_normalisation(tmp_path):
    """What comes out for equal rows is rounding, which may look like something that all rows share."""
    torch.manual_seed(0)
    inputs = torch.randn(9, 6)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for batch in ([3, 3], [0, 1], [2, 4]):
            recorder.batch(sample_id=batch)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), torch.tensor(batch) % 3).backward()
            optimizer.step()
    names, _ = named_slots(tmp_path / "run", "5")
    assert names == [3, 3, 0, 1, 2, 4]
    assert set(dualform.open(tmp_path / "run", model).verify().rows["proved"]) == {1}


def test_a_row_that_stays_as_it_is_behind_a_batch_normalisation_and_a_relu(tmp_path):
    """The next layer makes a constant of its zeros; the other rows change with each other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.ReLU(), nn.Linear(1, 1), nn.Linear(1, 3))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=[8, 0, 7])
        F.cross_entropy(model(torch.tensor([[-2.0], [1.0], [1.5]])), torch.tensor([0, 1, 2])).backward()
        optimizer.step()
    names, _ = named_slots(tmp_path / "run", "4")
    assert names == [8, 0, 7]


def test_an_empty_batch_beside_position_ids_that_all_rows_share(tmp_path):
    torch.manual_seed(0)
    model = Words(nn.Linear(4, 4), places=True)
    dual = train_on_words(tmp_path / "run", model, [[0, 1], [], [2, 3]])
    assert dual.verify().passed
    assert dual.rows["sample_id"].to_list() == [0, 1, 2, 3]


def test_a_batch_that_was_announced_as_empty_and_is_not(tmp_path):
    torch.manual_seed(0)
    model = classifier()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=torch.arange(0))
        model(torch.randint(0, 9, (4,))).sum().backward()
        with pytest.raises(AxisError, match="batch\\(\\) announced 0 rows"):
            optimizer.step()


def test_several_rows_under_one_announced_row_are_refused(tmp_path):
    """Once the first axis is known to hold the rows; before, five vectors may be one sample without a batch axis."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BatchError, match=r"announced 1 row, but the model was given tensors of shapes \(5, 4\)"):
        with dualform.record(model, optimizer, tmp_path / "run") as recorder:
            for announced, given in ((3, 3), (1, 1), (1, 5)):
                recorder.batch(sample_id=list(range(announced)))
                model(torch.randn(given, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


def test_a_sample_without_a_batch_axis_is_one_row(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for sample in range(3):
            recorder.batch(sample_id=[sample])
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path / "run", model).slots("")["row"].to_list() == [0] * 5 + [1] * 5 + [2] * 5


def test_batch_after_the_forward_pass_is_told_at_the_end(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = dualform.record(model, optimizer, tmp_path / "run")
    recorder.batch(sample_id=[0])
    for sample in range(3):
        model(torch.randn(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.batch(sample_id=[sample])
    with pytest.warns(UserWarning, match="the last recorder.batch\\(\\) call was not followed by a forward pass"):
        recorder.close()
