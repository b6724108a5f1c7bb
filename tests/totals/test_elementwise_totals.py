"""Totals of networks with convolutions, embeddings and recurrent layers, under optimizers whose coefficients are matrices."""

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.dual.totals import find_totals
from dualform.record import finished
from lion import Lion

SAMPLES, ROWS, TIME, TOKENS, CLASSES, STEPS = 10, 4, 3, 5, 3, 8
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02),
    # A bias that moves on rounding alone divides it by eps
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-5, amsgrad=True),
}
EVERY = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.9, 0.9)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.8, maximize=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1, maximize=True),
    "lion": lambda p: Lion(p, lr=0.005, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1),
}


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.last(self.second(self.norm(self.first(x)).relu())).relu().mean((2, 3)))


class Language(nn.Module):
    """Each layer has one slot for each token."""

    def __init__(self):
        super().__init__()
        self.tokens, self.body = nn.Embedding(TOKENS, 4), nn.LSTM(4, 4, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.norm(self.body(self.tokens(x))[0]))


X = torch.randn(SAMPLES, 1, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TEXT = torch.randint(0, TOKENS, (SAMPLES, TIME + 1), generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(SAMPLES) % CLASSES
NETWORKS = {"cnn": Cnn, "language": Language}
BY = {"cnn": ["label", ("task", "label")], "language": ["label", "token"]}


def inputs(model):
    return X if isinstance(model, Cnn) else TEXT[:, :-1]


def target(output):
    return output[:, 1] if output.dim() == 2 else output[:, -1, 1]


def train(path, network, optimizer, *, steps=STEPS, start=0, microbatches=1, model=None, made=None, **settings):
    torch.manual_seed(0)
    model = NETWORKS[network]().double() if model is None else model
    made = (OPTIMIZERS | EVERY)[optimizer](model.parameters()) if made is None else made
    with dualform.record(model, made, path, **settings) as recorder:
        for step in range(start, start + steps):
            made.param_groups[0]["lr"] *= 0.95
            made.zero_grad()
            for part in range(microbatches):
                ids = (torch.arange(ROWS) * 3 + step + part) % SAMPLES
                recorder.batch(label=LABELS[ids], task="ab"[step % 2], token=TEXT[ids, :-1])
                output = model(inputs(model)[ids])
                if output.dim() == 2:
                    loss = F.cross_entropy(output, LABELS[ids])
                else:
                    loss = F.cross_entropy(output.flatten(0, 1), TEXT[ids, 1:].flatten())
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            made.step()
    return model, made


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads wait for each other longer than these networks take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


WAYS = [f"{n} {o} {how}" for n in NETWORKS for o in OPTIMIZERS for how in ("online", "built", "only")]


@pytest.fixture(scope="module", params=WAYS)
def runs(request, tmp_path_factory):
    """(a run with slots alone, the same run with totals, what they are by), the totals made in three ways."""
    network, optimizer, how = request.param.split()
    folder, by = tmp_path_factory.mktemp("runs"), BY[network]
    common = {"chunk_bytes": 8000, "microbatches": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished, "STRETCH_BYTES", 20_000)  # several stretches
        plain, _ = train(folder / "plain", network, optimizer, **common)
        if how == "built":
            other, _ = train(folder / "totals", network, optimizer, **common)
            for columns in by:
                dualform.build_totals(folder / "totals", columns)
        else:
            keep = "totals" if how == "only" else "slots"
            other, _ = train(folder / "totals", network, optimizer, **common, keep=keep, totals=by)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), other.parameters(), strict=True))
    return dualform.open(folder / "plain", plain), dualform.open(folder / "totals", other), other, by


@pytest.fixture
def no_scan(monkeypatch):
    def forbid():
        monkeypatch.setattr("dualform.query.scan.tiles", lambda *_: pytest.fail("it was scanned"))

    return forbid


def assert_same(found, expected, atol=1e-11):
    """Lion divides what slots wrote by sizes that may be small, so that masks may move a weight far."""
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def test_initial_part_and_groups_are_the_weights(runs):
    _, dual, model, by = runs
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    for columns in by:
        view = find_totals(dual.store, [columns] if isinstance(columns, str) else columns, dual.end_step, deltas=True)
        for name, parameter in model.named_parameters():
            together = view.initial(name) + view.deltas(name).sum(0)
            torch.testing.assert_close(
                together, parameter.detach(), rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_masks_from_group_deltas_equal_masks_from_slots(runs):
    scan, dual, _, by = runs
    conditions = [pl.col("label") == 1, "label <> 0"]
    conditions += ["task = 'a' AND label < 2"] if "token" not in by else [pl.col("token") == 2]
    for condition in conditions:
        assert_same(dual.masked(drop=condition), scan.masked(drop=condition))
        assert_same(dual.masked(only=condition, layers="head"), scan.masked(only=condition, layers="head"))


def test_scan_and_totals_agree(runs, no_scan):
    scan, dual, model, by = runs
    x = inputs(model)[:4]
    asked, answers = {}, {}
    for columns in (c if isinstance(c, str) else list(c) for c in by):
        asked[str(columns)] = {name: a.total(columns) for name, a in scan.attend(x).items()}
        answers[str(columns)] = {
            name: [a.total(columns), *(t.total(columns) for t in a.tied.values())]
            for name, a in scan.contributions(x, target=target).items()
        }
    if dual.store.manifest.keep == "totals":
        no_scan()
    for columns in (c if isinstance(c, str) else list(c) for c in by):
        for name, attention in dual.attend(x).items():
            found, expected = attention.total(columns), asked[str(columns)][name]
            assert found.drop("total").equals(expected.drop("total"))
            np.testing.assert_allclose(found["total"], expected["total"], rtol=0, atol=1e-11, err_msg=name)
        for name, contributions in dual.contributions(x, target=target).items():
            expected = answers[str(columns)][name]
            found = contributions.total(columns)
            assert found.drop("total").equals(expected[0].drop("total"))
            if dual.store.manifest.keep == "totals":  # there, group deltas know of no layer
                expected = sum(frame["total"].to_numpy() for frame in expected)
            else:
                expected = expected[0]["total"].to_numpy()
            np.testing.assert_allclose(found["total"], expected, rtol=0, atol=1e-11, err_msg=name)


def test_key_sums_need_no_scan(runs, no_scan):
    _, dual, model, by = runs
    no_scan()
    for columns in by:
        for attention in dual.attend(inputs(model)[:2]).values():
            attention.total(columns if isinstance(columns, str) else list(columns))


def test_the_last_layer_adds_up_to_the_logit(runs):
    _, dual, model, _ = runs
    parts = dual.contributions(inputs(model), target=target)["head"].parts()
    logits = target(model.eval()(inputs(model))).tolist()
    assert parts["target"].to_list() == pytest.approx(logits, rel=1e-12, abs=1e-13)
    assert parts["remainder"].abs().max() <= 1e-12


@pytest.mark.parametrize("optimizer", EVERY)
def test_totals_alone_under_every_optimizer(tmp_path, optimizer):
    model, _ = train(tmp_path / "totals", "language", optimizer, keep="totals", totals=["label"], steps=5)
    plain, _ = train(tmp_path / "slots", "language", optimizer, steps=5)
    dual, scan = dualform.open(tmp_path / "totals", model), dualform.open(tmp_path / "slots", plain)
    assert dual.store.manifest.chunks == ()
    assert dual.verify().passed, str(dual.verify())
    assert_same(dual.masked(drop="label = 1"), scan.masked(drop="label = 1"))


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "lion", "adafactor"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("keep", ["slots", "totals"])
def test_totals_go_on_after_resume(tmp_path, network, optimizer, keep):
    settings = {"keep": keep, "totals": BY[network]}
    straight, _ = train(tmp_path / "straight", network, optimizer, **settings)
    model, made = train(tmp_path / "parts", network, optimizer, steps=3, **settings)
    train(
        tmp_path / "parts",
        network,
        optimizer,
        steps=STEPS - 3,
        start=3,
        model=model,
        made=made,
        resume=True,
        **settings,
    )
    one, two = dualform.open(tmp_path / "straight", straight), dualform.open(tmp_path / "parts", model)
    assert two.end_step == STEPS
    assert two.verify().passed, str(two.verify())
    assert_same(two.masked(drop="label = 1"), one.masked(drop="label = 1"))
    for columns in BY[network]:
        columns = columns if isinstance(columns, str) else list(columns)
        found, expected = (
            dual.contributions(inputs(model), target=target)["head"].total(columns) for dual in (two, one)
        )
        assert found.drop("total").equals(expected.drop("total"))
        np.testing.assert_allclose(found["total"], expected["total"], rtol=0, atol=1e-11)


def test_recording_totals_changes_nothing(tmp_path):
    for network in NETWORKS:
        with_totals, _ = train(tmp_path / f"{network}1", network, "adamw", totals=["label"])
        without, _ = train(tmp_path / f"{network}2", network, "adamw")
        assert all(torch.equal(p, q) for p, q in zip(with_totals.parameters(), without.parameters(), strict=True))


def test_queries_of_an_embedding_without_a_model(tmp_path):
    """Then a query is a vector, one-hot or not."""
    train(tmp_path / "run", "language", "adamw", totals=["label"])
    train(tmp_path / "plain", "language", "adamw")
    query = {"tokens": torch.eye(TOKENS, dtype=torch.float64)[1:4] + 0.5}
    found, expected = (dualform.open(tmp_path / name).attend(query)["tokens"] for name in ("run", "plain"))
    assert found.top(3).equals(expected.top(3))
    assert found.total("label").equals(expected.total("label"))


def test_a_column_per_token_needs_layers_with_as_many_positions(tmp_path):
    with pytest.raises(dualform.errors.RecordingError, match="the column has 3 positions, layer 'first' has 30"):
        train(tmp_path, "cnn", "adamw", totals=["token"])
    train(tmp_path / "slots", "cnn", "adamw")
    with pytest.raises(dualform.errors.QuestionError, match="another number of positions than the column"):
        dualform.build_totals(tmp_path / "slots", "token")


def test_slots_that_cancel_in_a_bias_leave_the_same_in_totals_and_scans(tmp_path):
    """What is left is far below their rounding in float64, and Adam divides it by its own size."""
    error_signals = torch.tensor([[1.0, 1.0], [1e-17, 1.0], [-1.0, 1.0], [1e-17, 1.0]], dtype=torch.float64)
    model = nn.Linear(2, 2, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-18)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64") as recorder:
        recorder.batch(label=[0, 0, 0, 1])
        (model(torch.ones(4, 2, dtype=torch.float64)) * error_signals).sum().backward()
        optimizer.step()
    scanned = dualform.open(tmp_path / "run", model).masked(drop="label = 0").bias
    dualform.build_totals(tmp_path / "run", "label")
    by_totals = dualform.open(tmp_path / "run", model).masked(drop="label = 0").bias
    assert torch.allclose(by_totals, scanned, rtol=1e-12, atol=0)
