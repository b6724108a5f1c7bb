"""Readers of a recording that changes under them: they are told so, and nobody says that it is damaged."""

import shutil

import pytest
import torch
from inconsistent import answers, network, record

import dualform
from dualform.errors import StoreChangedError, StoreDamagedError, StoreError
from dualform.record.resuming import EarlierRecording
from dualform.store import catalog
from dualform.store.files import files_at
from dualform.store.format import MANIFEST, read_manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed") / "whole"
    record(folder)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def questions(dual):
    """Each touches other files."""
    return {
        "rows": lambda: dual.rows,
        "log": lambda: dual.log,
        "info": lambda: dual.info(),
        "slots": lambda: dual.layer("head").keys,
        "snapshot": lambda: dual.at(8).model(),
        "totals": lambda: dual.store.totals(),
        "groups": lambda: dual.store.groups(0),
        "verify": lambda: dual.verify(),
    }


NAMES = list(questions(None))


@pytest.mark.parametrize("question", NAMES)
def test_a_run_that_was_overwritten_since(run, question):
    dual = dualform.open(run, network())
    record(run, seed=1, overwrite=True)
    with pytest.raises(
        StoreChangedError, match=r"another recording has replaced that in \S+run since it was opened. Open it again"
    ):
        questions(dual)[question]()
    assert answers(run)


@pytest.mark.parametrize("question", NAMES)
def test_a_run_that_is_being_overwritten(run, question):
    """Its manifest is the first that goes."""
    dual = dualform.open(run, network())
    (run / MANIFEST).unlink()
    shutil.rmtree(run / "chunk-000000")
    shutil.rmtree(run / "totals-000000")
    (run / "snapshot-000000008.safetensors").unlink()
    with pytest.raises(
        StoreChangedError, match="has no manifest any more: the recording is being overwritten, or was removed"
    ):
        questions(dual)[question]()


@pytest.mark.parametrize("question", NAMES)
def test_a_run_that_was_removed(run, question):
    dual = dualform.open(run, network())
    shutil.rmtree(run)
    with pytest.raises(StoreChangedError, match="or was removed, since it was opened"):
        questions(dual)[question]()


@pytest.mark.parametrize("question", NAMES)
def test_a_run_that_was_resumed_from_an_earlier_step(run, question):
    dual = dualform.open(run, network())
    record(run, resume=4)
    with pytest.raises(
        StoreChangedError, match=r"has changed since it was opened .*resumed from an earlier step.*Open it again"
    ):
        questions(dual)[question]()
    assert answers(run)


def test_a_run_that_is_being_resumed(run):
    """Between the manifest that drops steps and the chunks that replace them."""
    dual = dualform.open(run, network())
    resumed = []

    def look(*_):
        resumed.append(read_manifest(files_at(run)).end_step)
        shutil.rmtree(run / "chunk-000003")
        with pytest.raises(StoreChangedError, match="chunk-000003"):
            dual.rows  # noqa: B018

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualform.store.writer.Writer.put", look)
        record(run, resume=4, steps=5)
    assert resumed == [4]


def test_totals_that_were_built_again(run):
    dual = dualform.open(run)
    dualform.build_totals(run, "sample_id")
    for question in ("totals", "groups"):
        with pytest.raises(StoreChangedError, match="its totals were built again"):
            questions(dual)[question]()
    assert dual.rows.height == 32  # the chunks are the same
    assert dualform.open(run).store.groups(0).height


def test_what_was_read_before_stays_readable(run):
    """A mapped file is there until nobody maps it any more."""
    dual = dualform.open(run, network())
    before = questions(dual)["slots"]().clone()
    dual.rows, dual.verify()
    record(run, seed=1, overwrite=True)
    assert dual.layer("head").keys.equal(before)
    assert dual.rows.height == 32


@pytest.mark.parametrize(
    "name",
    [
        "chunk-000001",
        "chunk-000001/slots.safetensors",
        "chunk-000002/rows.parquet",
        "chunk-000003/updates.parquet",
        "chunk-000000/steps.parquet",
        "snapshot-000000008.safetensors",
        "totals-000000/totals.safetensors",
        "totals-000000/groups-000.parquet",
    ],
)
def test_files_that_vanish_though_the_manifest_names_them(run, name):
    dual = dualform.open(run, network())
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(StoreDamagedError, match=rf"{name}\S* is missing, though the manifest names it"):
        for question in questions(dual).values():
            question()


def test_files_that_change_though_the_manifest_does_not(run):
    """What another process replaces without saying so is damage."""
    dual = dualform.open(run, network())
    shutil.copytree(run / "chunk-000001", run / "new")
    for path in (run / "new").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    shutil.rmtree(run / "chunk-000001")
    (run / "new").rename(run / "chunk-000001")
    for question in ("rows", "slots"):
        with pytest.raises(StoreDamagedError, match=r"chunk-000001/\S+ is damaged"):
            questions(dual)[question]()


# Opening


def test_a_run_that_changes_while_it_is_opened_is_opened_again(run, monkeypatch):
    stale = read_manifest(files_at(run))
    record(run, seed=1, overwrite=True)
    given = [stale]
    monkeypatch.setattr(catalog, "read_manifest", lambda files: given.pop() if given else read_manifest(files))
    assert dualform.open(run).store.manifest.run == read_manifest(files_at(run)).run


def test_a_run_that_never_stops_changing(run, monkeypatch):
    stale = read_manifest(files_at(run))
    record(run, seed=1, overwrite=True)
    calls = []

    def load(files):
        calls.append(files)
        return read_manifest(files) if len(calls) % 2 == 0 else stale

    monkeypatch.setattr(catalog, "read_manifest", load)
    with pytest.raises(StoreChangedError, match="Open it again"):
        dualform.open(run)
    assert len(calls) == 2 * catalog.OPENINGS


def test_a_manifest_that_cannot_be_read_now_hides_no_damage(run):
    dual = dualform.open(run)
    (run / "chunk-000001/rows.parquet").unlink()
    (run / MANIFEST).write_text("{")
    with pytest.raises(StoreDamagedError, match=r"rows\.parquet is missing"):
        dual.rows  # noqa: B018


def test_the_error_is_a_store_error():
    assert issubclass(StoreChangedError, StoreError)
    assert not issubclass(StoreChangedError, StoreDamagedError)


@pytest.mark.filterwarnings("ignore:resume. the optimizer has no momentum")
def test_a_run_that_is_resumed_again_and_again_at_the_same_step(run):
    """The first to go on writes the snapshot of that step, which all others keep."""
    data = EarlierRecording(files_at(run), 7).manifest
    (run / MANIFEST).write_bytes(data.dump())
    model = network()
    weights = dualform.open(run, model).at(7).model().state_dict()
    for _ in range(3):
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dualform.record(model, optimizer, run, resume=7).close()
        assert 7 in dualform.open(run).store.snapshot_steps()
        assert dualform.open(run).store.snapshot(7)
    assert answers(run)
