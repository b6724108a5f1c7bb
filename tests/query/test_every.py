"""every=n: the slots of one step in n are kept, and sums over steps are estimates."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import NotRecordedError

STEPS = 40
EVERY = 4
ROWS = 5
SAMPLES = 15


def recorded(path, every, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs = torch.randn(SAMPLES, 6, dtype=torch.float64)
    labels = torch.arange(SAMPLES) % 3
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizer, path, every=every) as recorder:
        for _ in range(STEPS):
            ids = torch.randint(0, SAMPLES, (ROWS,), generator=generator)
            recorder.batch(sample_id=ids, label=labels[ids])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()
    return dualform.open(path, model), inputs[:3]


def test_one_step_of_each_window_is_kept_and_its_slots_are_those_of_a_whole_recording(tmp_path):
    some, _ = recorded(tmp_path / "some", EVERY)
    every, _ = recorded(tmp_path / "every", 1)
    kept = [step for step in range(STEPS) if some.store.manifest.keeps_step(step)]
    assert [step // EVERY for step in kept] == list(range(STEPS // EVERY))
    assert len({step % EVERY for step in kept}) > 1
    assert some.info()["every"] == EVERY
    assert sorted(set(some.slots("0")["step"])) == kept
    assert some.rows.equals(every.rows)
    found, whole = (
        torch.cat([chunk.errors(torch.float64) for chunk in dual.store.chunks("0")]) for dual in (some, every)
    )
    is_kept = torch.from_numpy(every.slots("0")["step"].is_in(kept).to_numpy())
    torch.testing.assert_close(found, whole[is_kept], rtol=0, atol=0)


def test_totals_are_those_of_the_kept_steps_with_the_error_of_a_sample_of_steps(tmp_path):
    some, inputs = recorded(tmp_path / "some", EVERY)
    answer = some.attend(inputs)["0"]
    by_step = answer.total(["label", "step"])
    assert "standard_error" not in by_step.columns
    table = answer.total("label")
    steps = STEPS // EVERY
    for line in table.iter_rows(named=True):
        own = by_step.filter(query=line["query"], label=line["label"]).rows_by_key("step", named=True, unique=True)
        mine = [total["total"] for step, total in own.items() if some.store.manifest.keeps_step(step)]
        mine += [0.0] * (steps - len(mine))
        mean = sum(mine) / steps
        variance = sum((one - mean) ** 2 for one in mine) / (steps - 1)
        expected = EVERY * math.sqrt(steps * variance * (1 - 1 / EVERY))
        assert line["total"] == pytest.approx(EVERY * sum(mine), rel=1e-12)
        assert line["standard_error"] == pytest.approx(expected, rel=1e-9)


def test_a_group_that_was_not_kept_has_no_standard_error(tmp_path):
    some, inputs = recorded(tmp_path / "some", STEPS // 2)
    kept = set(some.slots("0").join(some.rows.with_row_index("row"), on="row")["sample_id"])
    for answer in (some.attend(inputs)["0"], some.influence(inputs)):
        table = answer.total("sample_id")
        assert set(table["sample_id"]) > kept
        for line in table.iter_rows(named=True):
            assert math.isnan(line["standard_error"]) == (line["sample_id"] not in kept), line


def test_rows_of_other_steps_have_no_influence_instead_of_none(tmp_path):
    some, inputs = recorded(tmp_path / "some", EVERY)
    answer = some.influence(inputs)
    kept = set(some.slots("0")["row"])
    for lowest in (False, True):
        rows = answer.top(len(some.rows), lowest=lowest)
        assert set(rows["row"]) == kept
    ranked = answer.top(SAMPLES, by="sample_id")
    assert ranked["visits"].sum() == 3 * len(kept)


def test_intervals_cover_the_totals_of_all_steps(tmp_path):
    every, inputs = recorded(tmp_path / "every", 1)
    exact = every.attend(inputs)["0"].total("label")["total"].to_torch()
    covered = 0
    count = 0
    for draw in range(12):
        some, _ = recorded(tmp_path / f"some {draw}", EVERY)
        found = some.attend(inputs)["0"].total("label")
        off = (found["total"].to_torch() - exact).abs()
        covered += int((off <= 1.96 * found["standard_error"].to_torch()).sum())
        count += len(exact)
    assert covered / count >= 0.85  # of 95 %, with ten steps in a sample and twelve samples


def test_what_needs_all_steps_is_refused(tmp_path):
    some, inputs = recorded(tmp_path / "some", EVERY)
    for question in (
        lambda: some.masked(drop="label = 1"),
        lambda: some.contributions(inputs),
        lambda: some.compact(2),
    ):
        with pytest.raises(NotRecordedError, match=r"only the slots of one step in 4 are kept \(every=\)"):
            question()
    with pytest.raises(NotRecordedError, match="keeps one step in 4 only: the network is known after"):
        some.at(3).model()
    frame = some.verify().frame
    assert set(frame["verdict"]) == {"gradients"}
    assert "so no sum was checked" in frame["reason"][0]
    assert some.influence(inputs).total("label")["standard_error"].is_finite().all()
