"""Curvature: built from slots, counted while recording, kept and found again."""

import networks
import numpy as np
import pytest
import torch

import dualform
from dualform.curvature.loss_mean import LossMean
from dualform.errors import RecordingError
from dualform.query.influence import factors
from dualform.query.influence.factors import built_factors, recorded_factors
from dualform.query.influence.rows import RowPiece
from dualform.query.influence.segments import segments
from dualform.record import curvature
from dualform.store import cache_files
from training import network, sgd, train

ASKED = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def close(found, expected, rtol):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=rtol, atol=1e-9)
        torch.testing.assert_close(one.errors, other.errors, rtol=rtol, atol=1e-9)
        assert one.positions == other.positions


@pytest.mark.parametrize("name", [None, *networks.NETWORKS])
def test_what_is_counted_while_recording_is_what_slots_say(name, tmp_path, monkeypatch):
    monkeypatch.setattr(curvature, "EVERY", 1)
    if name is None:
        run = train(tmp_path / "run", curvature=True)
    else:
        run = networks.train(name, tmp_path / "run", curvature=True)
    store = run.dual.store
    [whole] = segments(store, store.end_step, [(0, store.end_step)])
    for layer in store.manifest.layers:
        built = built_factors(store, layer, whole, LossMean(store))
        found = recorded_factors(store, layer, whole, built.maps[0].positions)
        monkeypatch.setattr(factors, "recorded_factors", lambda *_, **__: None)
        expected = built_factors(store, layer, whole, LossMean(store)).maps
        monkeypatch.undo()
        monkeypatch.setattr(curvature, "EVERY", 1)
        assert found is not None
        close(found, expected, rtol=1e-5)  # snapshots hold float32


def test_one_step_in_eight_counts(tmp_path):
    store = train(tmp_path / "run", steps=32, chunk_bytes=1500, curvature=True).dual.store
    files = [file for step in store.snapshot_steps() if "curvature.0.slots" in (file := store.snapshot(step))]
    assert sum(int(file["curvature.0.slots"]) for file in files) == 4 * 5
    [whole] = segments(store, 32, [(0, 32)])
    assert (
        recorded_factors(store, store.manifest.layers[0], whole, 1.0) is None
    )  # most stretches were too short for a step


def test_stretches_are_weighed_by_what_a_segment_meets_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(curvature, "EVERY", 2)
    store = train(tmp_path / "run", steps=32, chunk_bytes=1500, curvature=True).dual.store
    layer, inside = store.manifest.layers[0], store.snapshot_steps()
    begin, middle, end = inside[1:4]
    assert middle - begin > 2
    [segment] = segments(store, 32, [(begin + 1, end)])  # all of the first stretch but a step, and the second
    [found] = recorded_factors(store, layer, segment, 1.0)
    first, second = store.snapshot(middle), store.snapshot(end)
    share = (middle - begin - 1) / (middle - begin) * int(first["curvature.0.slots"])
    other = int(second["curvature.0.slots"])
    for part in ("keys", "errors"):
        both = share * first[f"curvature.0.0.{part}"].double() + other * second[f"curvature.0.0.{part}"].double()
        torch.testing.assert_close(getattr(found, part), both / (share + other), rtol=1e-6, atol=1e-12)
    [short] = segments(store, 32, [(begin, middle - 1)])
    assert recorded_factors(store, layer, short, 1.0) is None  # its stretch tells of more than itself


def test_without_it_nothing_is_found(trained):
    store = trained.dual.store
    [whole] = segments(store, 6, [(0, 6)])
    assert recorded_factors(store, store.manifest.layers[0], whole, 1.0) is None


def test_curvature_needs_slots(tmp_path):
    model = network()
    with pytest.raises(RecordingError, match='curvature=True needs keep="slots", "rows" or "projected"'):
        dualform.record(model, sgd(model), tmp_path / "run", keep="keys", curvature=True)


def test_what_was_built_is_kept_and_read_again(tmp_path, monkeypatch):
    run = train(tmp_path / "run")
    built = []
    original = factors.built_factors
    monkeypatch.setattr(factors, "built_factors", lambda *args: built.append(args) or original(*args))
    told = []
    two = [(0, 3), (3, 6)]
    first = run.dual.influence(ASKED, segments=two, progress=lambda *args: told.append(args)).total("sample_id")
    assert len(built) == 4  # two layers, two segments
    assert ("curvature", 4, 4) in told
    again = run.dual.influence(ASKED, segments=two).total("sample_id")
    assert len(built) == 4
    np.testing.assert_array_equal(first["total"], again["total"])
    run.dual.influence(ASKED, segments=[(1, 3), (3, 6)])
    assert len(built) == 6  # one segment is another one


def test_a_damaged_file_is_said_to_be_so(tmp_path):
    run = train(tmp_path / "run")
    run.dual.influence(ASKED, segments=1)
    for path in run.path.glob("curvature-*"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    with pytest.raises(dualform.errors.StoreDamagedError, match="curvature-"):
        run.dual.influence(ASKED, segments=1)


def test_overwriting_a_recording_takes_its_curvature_along(tmp_path):
    run = train(tmp_path / "run")
    run.dual.influence(ASKED, segments=1)
    assert list(run.path.glob("curvature-*"))
    train(tmp_path / "run", overwrite=True)
    assert not list(run.path.glob("curvature-*"))


def test_a_store_that_cannot_be_written_answers_all_the_same(tmp_path, monkeypatch):
    run = train(tmp_path / "run")

    def refuse(*args):
        raise OSError("read-only")

    monkeypatch.setattr(cache_files, "write_tensors", refuse)
    assert run.dual.influence(ASKED, segments=1).top(1).height == 2


def test_few_slots_are_taken_from_a_long_segment(tmp_path, monkeypatch):
    monkeypatch.setattr(factors, "SLOTS_TAKEN", 40)
    run = train(tmp_path / "run", steps=24)
    store = run.dual.store
    [whole] = segments(store, 24, [(0, 24)])
    calls = [RowPiece.of_block(chunk, block) for chunk in store.chunks("0") for block in range(len(chunk.blocks))]
    taken = sum(piece.rows for piece in factors._spread(calls))
    assert 32 <= taken <= 48  # 16 steps at least, of 24 with 5 rows each
    assert len(built_factors(store, store.manifest.layers[0], whole, LossMean(store)).maps) == 1
