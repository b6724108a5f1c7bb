"""Contributions of whole rows are the sums of those of their slots."""

import numpy as np
import polars as pl
import pytest
import torch

from dualform.dual import kept_coefficients
from dualform.dual import scores as dual_scores
from dualform.dual.coefficients import updates_of
from dualform.dual.kept_coefficients import coefficient_matrices, is_kept
from dualform.dual.replay import Backward
from dualform.errors import StoreDamagedError
from dualform.query import contribution_rows
from dualform.query.contribution_rows import RowContributions
from dualform.query.slots import describe
from dualform.store import cache_files
from recorded_networks import NETWORKS, target
from recorded_networks import train as train_network
from training import samples, train

pytestmark = pytest.mark.filterwarnings("ignore:not recorded, so taken from the snapshot")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def small_run(path, **settings):
    return train(path, precision=torch.float32, optimizer=adamw, steps=9, dtype="float32", **settings)


def asked():
    inputs, _ = samples(torch.float32)
    return inputs[:3]


def all_units(output):
    """A target that depends on every output: of a single one, the other rows of the last weight are not replayed."""
    return output @ torch.arange(1.0, 5)


@pytest.fixture
def always_kept(monkeypatch):
    """Beside a store of few kilobytes, coefficients are large."""
    monkeypatch.setattr(kept_coefficients, "SHARE", 1e9)


def by_plain_loop(dual, answer, by, matches=None):
    """Slot by slot: (query, group) → total and visits."""
    store = dual.store
    name = answer.layer.name
    slots = describe(store, name, np.arange(store.slots(name)), store.end_step)
    totals = {}
    visits = {}
    for tile in answer.scores():
        for place, slot in enumerate(tile.slots.tolist()):
            line = slots.row(slot, named=True)
            if matches is not None and not matches(line):
                continue
            visits[line[by]] = visits.get(line[by], 0) + 1
            for query, score in enumerate(tile.scores[:, place].tolist()):
                key = (query, line[by])
                totals[key] = totals.get(key, 0.0) + score
    return totals, visits


def assert_same(table, totals, atol=1e-12):
    found = {(query, group): total for query, group, total in table.iter_rows()}
    size = max(map(abs, totals.values()))
    for key, total in totals.items():
        assert found.pop(key) == pytest.approx(total, abs=atol * size)
    assert not any(found.values())


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("network", NETWORKS)
def test_totals_are_the_sums_of_slots(network, optimizer, examples, tmp_path, monkeypatch):
    run = train_network(network, optimizer, tmp_path / "run")
    monkeypatch.setattr(dual_scores, "WRITING", -1000 if examples > 1 else 1000)  # both ways to a row's score
    monkeypatch.setattr(contribution_rows, "PIECE_BYTES", 2000)
    answers = run.dual.contributions(run.inputs[:examples], target=target)
    for layer in answers:
        totals, visits = by_plain_loop(run.dual, answers[layer], "sample_id")
        assert_same(answers[layer].total("sample_id"), totals)
        best = answers[layer].top(3, by="sample_id")
        for group, count in best.select("sample_id", "visits").iter_rows():
            assert visits[group] == count


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_conditions_and_silent_slots(optimizer, tmp_path):
    run = train_network("gpt", optimizer, tmp_path / "run")
    answers = run.dual.contributions(run.inputs[:2], target=target)
    condition = pl.col("sample_id") != 2
    for layer in answers:
        totals, _ = by_plain_loop(run.dual, answers[layer], "step", lambda line: line["sample_id"] not in (2, None))
        assert_same(answers[layer].total("step", where=condition), totals)


def test_another_column_takes_no_product(tmp_path, monkeypatch):
    run = small_run(tmp_path / "run")
    answer = run.dual.contributions(asked(), target=1)
    answer.top(3, by="sample_id")

    def refuse(*args):
        raise AssertionError("scored again")

    monkeypatch.setattr(RowContributions, "_score", refuse)
    assert answer.total("label").height == 3 * 4


# Coefficients


def test_coefficients_are_kept_and_found_again(tmp_path, always_kept, monkeypatch):
    run = small_run(tmp_path / "run")
    first = run.dual.contributions(asked(), target=all_units).total("sample_id")
    assert len(list(run.path.glob("coefficients-*"))) == 4  # two layers, each with a weight and a bias

    def refuse(*args, **settings):
        raise AssertionError("replayed again")

    monkeypatch.setattr(kept_coefficients, "Backward", refuse)
    again = run.dual.contributions(asked(), target=all_units).total("sample_id")
    np.testing.assert_array_equal(first["total"], again["total"])
    other = run.dual.contributions(asked(), target=lambda output: all_units(output) * 2).total("sample_id")
    assert not np.array_equal(other["total"], again["total"])


@pytest.mark.parametrize("file_bytes", [1, 1000, 1 << 20])
def test_what_is_read_is_what_was_replayed(tmp_path, always_kept, monkeypatch, file_bytes):
    monkeypatch.setattr(kept_coefficients, "FILE_BYTES", file_bytes)
    store = small_run(tmp_path / "run").dual.store
    for parameter in store.manifest.parameters:
        updates = updates_of(store, parameter.name)
        expected = [(place, matrix.clone()) for place, matrix in Backward(store, updates)]
        for _ in range(2):  # written, then read
            found = list(coefficient_matrices(store, updates))
            assert [place for place, _ in found] == [place for place, _ in expected]
            for (_, matrix), (_, other) in zip(found, expected, strict=True):
                torch.testing.assert_close(matrix, other, rtol=0, atol=0)


def test_they_are_not_kept_where_they_are_large_or_of_a_part_of_the_training(tmp_path, monkeypatch):
    run = small_run(tmp_path / "run")
    store = run.dual.store
    name = store.manifest.parameters[0].name
    monkeypatch.setattr(kept_coefficients, "SHARE", 1e-9)
    assert not is_kept(store, updates_of(store, name))
    run.dual.contributions(asked(), target=1).total("sample_id")
    assert not list(run.path.glob("coefficients-*"))
    monkeypatch.setattr(kept_coefficients, "SHARE", 1e9)
    assert is_kept(store, updates_of(store, name))
    assert not is_kept(store, updates_of(store, name, end=5))
    assert not is_kept(store, updates_of(store, name, begin=2))


def test_coefficients_that_are_no_numbers_are_not_kept(tmp_path, always_kept, monkeypatch):
    class Infinite(Backward):
        def __iter__(self):
            return ((place, matrix.fill_(torch.inf)) for place, matrix in super().__iter__())

    run = small_run(tmp_path / "run")
    monkeypatch.setattr(kept_coefficients, "Backward", Infinite)
    updates = updates_of(run.dual.store, run.dual.store.manifest.parameters[0].name)
    assert len(list(coefficient_matrices(run.dual.store, updates))) == 9
    assert not list(run.path.glob("coefficients-*"))


def test_a_damaged_file_is_said_to_be_so(tmp_path, always_kept):
    run = small_run(tmp_path / "run")
    run.dual.contributions(asked(), target=1).total("sample_id")
    for path in run.path.glob("coefficients-*"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    with pytest.raises(StoreDamagedError, match="coefficients-"):
        run.dual.contributions(asked(), target=1).total("sample_id")


def test_a_store_that_cannot_be_written_answers_all_the_same(tmp_path, always_kept, monkeypatch):
    run = small_run(tmp_path / "run")

    def refuse(*args):
        raise OSError("read-only")

    monkeypatch.setattr(cache_files, "write_tensors", refuse)
    assert run.dual.contributions(asked(), target=1).total("sample_id").height
    assert not list(run.path.glob("*coefficients-*"))


def test_overwriting_a_recording_takes_its_coefficients_along(tmp_path, always_kept):
    run = small_run(tmp_path / "run")
    run.dual.contributions(asked(), target=1).total("sample_id")
    assert list(run.path.glob("coefficients-*"))
    small_run(tmp_path / "run", overwrite=True)
    assert not list(run.path.glob("coefficients-*"))
