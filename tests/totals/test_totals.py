"""Totals, kept while recording or built from slots: they agree with the scan, and do not grow with the steps."""

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.dual import totals as dual_totals
from dualform.dual.masked import masked_by_groups
from dualform.dual.totals import find_totals
from dualform.errors import NotRecordedError, QuestionError, RecordingError
from dualform.record import finished

FEATURES, CLASSES, SAMPLES = 5, 3, 20


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double()


def train(path, model, *, steps=12, start=0, optimizer=None, microbatches=1, **settings):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.arange(SAMPLES) % CLASSES
    with dualform.record(model, optimizer, path, **settings) as recorder:
        for step in range(start, start + steps):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.zero_grad()
            for part in range(microbatches):
                ids = (torch.arange(4) + 4 * step + 2 * part) % SAMPLES
                recorder.batch(sample_id=ids, label=y[ids], task="even" if step % 2 else "odd")
                F.cross_entropy(model(x[ids]), y[ids]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    return x


@pytest.fixture(params=["online", "built", "only"])
def runs(request, tmp_path, monkeypatch):
    """(a run with slots alone, the same run with totals), the totals made in three ways."""
    monkeypatch.setattr(finished, "STRETCH_BYTES", 1500)  # several stretches
    plain, model = tmp_path / "plain", network()
    x = train(plain, model, chunk_bytes=2000, microbatches=2)
    path, other = tmp_path / "totals", network()
    by = ["label", "sample_id", ("task", "label")]
    if request.param == "built":
        train(path, other, chunk_bytes=2000, microbatches=2)
        for columns in by:
            dualform.build_totals(path, columns)
    else:
        keep = "totals" if request.param == "only" else "slots"
        train(path, other, chunk_bytes=2000, microbatches=2, keep=keep, totals=by)
    return dualform.open(plain, model), dualform.open(path, other), x, request.param


@pytest.mark.parametrize("queries", [1, 4, 9])
def test_large_sums_are_multiplied_in_their_own_type(tmp_path, monkeypatch, queries):
    """… for few queries by the loop in C, a stretch at a time."""
    model = network()
    x = train(tmp_path / "run", model)[:queries].float()
    dualform.build_totals(tmp_path / "run", "sample_id", kind="keys")
    view = find_totals(dualform.open(tmp_path / "run").store, ["sample_id"], 12, deltas=False)
    layer = dualform.open(tmp_path / "run").store.layer("0")[1]
    expected = x.double() @ view.key_sums(layer).double().T
    monkeypatch.setattr(dual_totals, "FLOAT64_NUMBERS", 0)
    monkeypatch.setattr(dual_totals, "STRETCH_BYTES", 4 * FEATURES * 7)
    torch.testing.assert_close(view.dots(layer, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", ["label", "sample_id", ["task", "label"]])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_scan_and_totals_agree(runs, by, layer, monkeypatch):
    scan, totals, x, _ = runs
    expected = scan.attend(x)[layer].total(by)
    contributed = scan.contributions(x)[layer].total(by)
    top = scan.attend(x)[layer].top(4, by=by)
    monkeypatch.setattr("dualform.query.scan.tiles", lambda *_: pytest.fail("it was scanned"))
    found = totals.attend(x)[layer].total(by)
    assert found.drop("total").equals(expected.drop("total"))
    np.testing.assert_allclose(found["total"], expected["total"], rtol=0, atol=1e-11)
    found = totals.contributions(x)[layer].total(by)
    assert found.drop("total").equals(contributed.drop("total"))
    np.testing.assert_allclose(found["total"], contributed["total"], rtol=0, atol=1e-11)
    found = totals.attend(x)[layer].top(4, by=by)
    columns = ["query", "rank", "visits", *([by] if isinstance(by, str) else by)]
    assert found.select(columns).equals(top.select(columns))


@pytest.mark.parametrize(
    "drop", [pl.col("label") == 1, (pl.col("task") == "odd") & (pl.col("label") != 0), "sample_id < 7"]
)
@pytest.mark.parametrize("layers", [None, "2"])
def test_masks_from_group_deltas_equal_masks_from_slots(runs, drop, layers):
    scan, totals, _, _ = runs
    expected, found = scan.masked(drop=drop, layers=layers), totals.masked(drop=drop, layers=layers)
    for (name, one), other in zip(expected.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=name)


def test_initial_part_and_groups_are_the_weights(runs):
    _, totals, x, how = runs
    certificate = totals.verify()
    assert certificate.passed
    assert certificate.frame["gap"].max() <= 1e-12
    parts = totals.contributions(x)["2"].parts()
    assert parts["remainder"].abs().max() <= 1e-12
    if how == "only":
        assert totals.store.manifest.chunks == ()


def test_absolute_sums_use_totals_only_where_nothing_is_negative(runs):
    scan, totals, x, how = runs
    expected = scan.attend(x)["2"].total("label", absolute=True)
    np.testing.assert_allclose(totals.attend(x)["2"].total("label", absolute=True)["total"], expected["total"])
    expected = scan.attend(x)["0"].total("label", absolute=True)
    if how == "only":
        with pytest.raises(NotRecordedError, match=r"keeps totals only, for label, sample_id, task \+ label"):
            totals.attend(x)["0"].total("label", absolute=True)
    else:
        np.testing.assert_allclose(totals.attend(x)["0"].total("label", absolute=True)["total"], expected["total"])


def test_disk_does_not_grow_with_the_steps(tmp_path):
    sizes = []
    for steps in (10, 100):
        train(tmp_path / str(steps), network(), steps=steps, keep="totals", totals=["label"], chunk_bytes=1000)
        sizes.append(dualform.open(tmp_path / str(steps)).info()["bytes"])
        on_disk = sum(f.stat().st_size for f in (tmp_path / str(steps)).rglob("*") if f.is_file())
        assert on_disk < sizes[-1] + 4000
    assert abs(sizes[0] - sizes[1]) <= 64  # digits of the numbers in the headers


def test_a_noisy_bias_is_exact_too(tmp_path):
    """A bias before BatchNorm moves on rounding alone: its gradients are kept, and the totals keep the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(32, FEATURES), torch.arange(32) % CLASSES
    with dualform.record(model, optimizer, tmp_path, totals=["label"]) as recorder:
        for _ in range(50):
            recorder.batch(label=y)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dual = dualform.open(tmp_path, model)
    assert dual.verify().passed, str(dual.verify())
    kept = dual.masked(only="label >= 0")
    assert float((kept[0].bias - model[0].bias).detach().norm()) <= 1e-6 * float(model[0].bias.detach().norm())


def test_totals_go_on_after_resume(tmp_path):
    straight, model = tmp_path / "straight", network()
    x = train(straight, model, steps=12, keep="totals", totals=["label"])
    parts, other = tmp_path / "parts", network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02)
    train(parts, other, steps=5, optimizer=optimizer, keep="totals", totals=["label"])
    train(parts, other, steps=7, start=5, optimizer=optimizer, keep="totals", totals=["label"], resume=True)
    one, two = dualform.open(straight, model), dualform.open(parts, other)
    assert two.end_step == 12
    assert two.verify().passed
    assert two.info()["rows"] == one.info()["rows"] == 48
    np.testing.assert_allclose(
        one.contributions(x)["2"].total("label")["total"], two.contributions(x)["2"].total("label")["total"], atol=1e-12
    )


def test_totals_alone_stay_where_the_checkpoint_is(tmp_path, monkeypatch):
    """An error, or the recorder's own snapshots, would take them to a step that no checkpoint has."""
    monkeypatch.setattr(finished, "SNAPSHOT_SHARE", 0)
    model, labels = network(), torch.arange(SAMPLES) % CLASSES
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(recorder, count):
        for _ in range(count):
            recorder.batch(label=labels)
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()

    options = {"keep": "totals", "totals": ["label"], "chunk_bytes": 1}
    with pytest.raises(KeyboardInterrupt), dualform.record(model, optimizer, tmp_path / "run", **options) as recorder:
        steps(recorder, 3)
        assert recorder.seal() == 3
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        steps(recorder, 4)
        raise KeyboardInterrupt
    for count in (0, 2):
        model.load_state_dict(kept)
        assert dualform.open(tmp_path / "run").end_step == 3
        with pytest.raises(KeyboardInterrupt), dualform.record(
            model, optimizer, tmp_path / "run", resume=3, **options
        ) as recorder:  # fmt: skip
            steps(recorder, count)
            raise KeyboardInterrupt
    model.load_state_dict(kept)
    with dualform.record(model, optimizer, tmp_path / "run", resume=3, **options) as recorder:
        steps(recorder, 2)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.end_step == 5
    assert dual.verify().passed


def test_per_position_totals(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, FEATURES, dtype=torch.float64)
    tokens = torch.arange(12).reshape(3, 4) % 5
    with dualform.record(model, optimizer, tmp_path, totals={"token": "keys"}) as recorder:
        for _ in range(3):
            recorder.batch(token=tokens)
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
    dual = dualform.open(tmp_path, model)
    found = dual.attend(torch.eye(FEATURES, dtype=torch.float64)[:, None])[""].total("token")
    for token in range(5):
        expected = 3 * x[tokens == token].sum(0)
        np.testing.assert_allclose(found.filter(pl.col("token") == token)["total"], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": "totals"}, r'needs totals=.*totals=\["label"\]'),
        ({"totals": {"label": "all"}}, "expected one of 'keys', 'deltas', 'both'"),
        ({"totals": ["colour"]}, "no column 'colour'; it has sample_id, label, task"),
        ({"totals": ["sample_id"], "totals_bytes": 1000}, r'totals=\{"sample_id": "keys"\}'),
    ],
)
def test_errors_say_what_to_do(tmp_path, settings, message):
    with pytest.raises(RecordingError, match=message):
        train(tmp_path / "run", network(), **settings)


def test_some_output_units_have_key_sums_only(tmp_path):
    model = network()
    train(tmp_path / "run", model, outputs={"2": [0, 2]})
    for kind in ("both", "deltas"):
        with pytest.raises(NotRecordedError, match=r"'2' only the error signals of some output units.*kind=\"keys\""):
            dualform.build_totals(tmp_path / "run", "label", kind=kind)
    dualform.build_totals(tmp_path / "run", "label", kind="keys")
    assert [g.kind for g in dualform.open(tmp_path / "run", model).store.manifest.totals.groupings] == ["keys"]


def test_what_totals_cannot_answer(tmp_path):
    model = network()
    x = train(tmp_path, model, keep="totals", totals=["label"])
    dual = dualform.open(tmp_path, model)
    with pytest.raises(NotRecordedError, match="single slots"):
        dual.attend(x)["0"].top(3)
    with pytest.raises(NotRecordedError, match="by sample_id"):
        dual.attend(x)["0"].total("sample_id")
    with pytest.raises(NotRecordedError, match="group deltas for its columns"):
        dual.masked(drop="sample_id = 3")
    with pytest.raises(NotRecordedError, match=r"after \[0, 12\] steps"):
        dual.at(5).model()
    with pytest.raises(QuestionError, match="no column 'colour'"):
        dualform.build_totals(train_slots(tmp_path / "slots"), "colour")


def train_slots(path):
    train(path, network())
    return path


@pytest.mark.parametrize(
    "keep",
    [
        pl.col("label") > pl.col("label").mean(),
        pl.col("label").is_first_distinct(),
        pl.len().over("label") > 12,
        pl.col("label").is_in([0, 2]),
    ],
)
def test_conditions_that_compare_rows_are_answered_from_rows(tmp_path, keep):
    model = network()
    train(tmp_path, model, totals=["label"])
    dual = dualform.open(tmp_path, model)
    found = [p.detach().clone() for p in dual.masked(only=keep).parameters()]
    plain = network()
    train(tmp_path / "plain", plain)
    expected = dualform.open(tmp_path / "plain", plain).masked(only=keep).parameters()
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [[0, 4], [4, 0], [0, 0, 4, 0]])
def test_an_empty_batch_is_in_no_group(tmp_path, order):
    model, ids, labels = network(), torch.arange(8), torch.arange(8) % CLASSES
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", totals=["label"]) as recorder:
        for step in range(2):
            optimizer.zero_grad()
            for count in order:
                some = ids[4 * step :][:count]
                recorder.batch(sample_id=some, label=labels[some])
                F.cross_entropy(model(x[some]), labels[some], reduction="sum").backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert not dual.slots("0")["silent"].any()  # for every row, some unit of the ReLU is on
    found = dual.attend(x)["0"].total("label").sort("query", "label")["total"].to_numpy().reshape(8, CLASSES)
    expected = [[(x[labels == label] @ query).sum() for label in range(CLASSES)] for query in x]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    view = find_totals(dual.store, ["label"], dual.end_step, deltas=True)
    torch.testing.assert_close(masked_by_groups(view, "2.weight"), model[2].weight.detach(), rtol=0, atol=1e-14)


def test_marks_are_kept_with_totals_alone(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"keep": "totals", "totals": ["label"], "on_unexplained": "mark"}
    with dualform.record(model, optimizer, tmp_path, **settings) as recorder:
        for step in range(4):
            recorder.batch(label=[0, 1, 2])
            optimizer.zero_grad()
            model(torch.arange(15.0, dtype=torch.float64).reshape(3, FEATURES).sin()).square().sum().backward()
            if step == 2:
                model[2].weight.grad.clamp_(-0.01, 0.01)
            optimizer.step()
    assert dualform.open(tmp_path).info()["inexact"]["2"]["step"] == 2
    with pytest.warns(dualform.errors.InexactWarning):
        dualform.open(tmp_path, model).masked(drop="label = 1")


def test_built_totals_leave_out_what_the_running_average_has_forgotten(tmp_path):
    models = [network(), network()]
    for name, model in zip(("plain", "built"), models, strict=True):  # 0.5 ** 105 is lost in rounding twice over
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        x = train(tmp_path / name, model, steps=160, optimizer=optimizer, chunk_bytes=20_000)
    dualform.build_totals(tmp_path / "built", "label")
    scan, totals = (
        dualform.open(tmp_path / name, model) for name, model in zip(("plain", "built"), models, strict=True)
    )
    for label in range(CLASSES):
        keep = pl.col("label") == label
        torch.testing.assert_close(totals.masked(only=keep)(x), scan.masked(only=keep)(x), rtol=1e-11, atol=1e-12)
