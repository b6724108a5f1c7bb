"""What goes wrong on a rank: every rank hears of it, none waits forever, and what all have sealed opens."""

import shutil

import pytest
import torch

import dualform
import rank_faults
from dualform.errors import RecordingError, StoreDamagedError, StoreError, StoreExistsError
from parallel_training import on_one_rank
from rank_faults import CASE


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    """A run of two ranks, which nobody may change."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    ranks.run(rank_faults.again, path)
    return path


def on_both(results, kind, words):
    """The same error on both ranks."""
    for result in results:
        assert (result.kind, words in result.message) == (kind, True), results


def on_rank_1(results, kind, words):
    """An error on rank 1, of which rank 0 hears."""
    assert results[1].kind == kind, results
    assert words in results[1].message
    assert results[0].kind == "RecordingError", results


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("changed_gradient", "'0.weight' has another gradient on each rank"),
        ("clipped_by_value", "clipped by value"),
        ("drifting_weights", "is not the same weight on all ranks"),
        ("never_averaged", "outside of no_sync()"),
    ],
)
def test_all_ranks_come_to_the_same_verdict(ranks, path, fault, words):
    on_both(ranks.attempt(getattr(rank_faults, fault), path), "UnexplainedError", words)


def test_a_rank_that_fails_before_it_meets_the_others_tells_them(ranks, path):
    results = ranks.attempt(rank_faults.edited_weight, path)
    on_rank_1(results, "UnexplainedError", "'0.weight' was changed")
    assert "another rank could not record this update" in results[0].message


@pytest.mark.parametrize(
    ("fault", "settings", "words"),
    [
        ("uneven_passes", {}, "different numbers of backward passes"),
        ("compressed", {}, "fp16_compress_hook of DistributedDataParallel may change gradients"),
        ("compressed", {"late": True}, "fp16_compress_hook of DistributedDataParallel may change gradients"),
        ("joined", {}, "model.join() is not recorded"),
        ("refused", {"totals": ["label"]}, "Build them from the slots when the recording is closed"),
        ("refused", {"curvature": True}, "influence() estimates curvature"),
        ("refused", {"on_write_error": "stop"}, 'Use "raise"'),
    ],
)
def test_refused_by_name_on_all_ranks(ranks, path, fault, settings, words):
    on_both(ranks.attempt(getattr(rank_faults, fault), path, **settings), "RecordingError", words)


def test_a_hook_that_averages_is_exact(ranks, path):
    ranks.run(rank_faults.compressed, path, hook="allreduce_hook")
    assert dualform.open(path).verify().passed


def test_a_shard_that_cannot_be_written_stops_all_ranks(ranks, path):
    results = ranks.attempt(rank_faults.only_rank_0_has_room, path)
    assert {result.kind for result in results} == {"RecordingError", "StoreExistsError"}
    assert all("Choose another path" in result.message for result in results)


@pytest.mark.parametrize(
    ("of_rank_1", "words"),
    [
        ({"keep": "slot"}, "keep='slot': expected one of"),
        ({"layers": "7"}, "layers="),
    ],
)
def test_an_argument_that_is_wrong_on_one_rank_stops_all(ranks, path, of_rank_1, words):
    on_rank_1(ranks.attempt(rank_faults.settings_of_ranks, path, {}, of_rank_1), "RecordingError", words)
    ranks.run(rank_faults.settings_of_ranks, path, {}, {})


@pytest.mark.parametrize("settings", [{"keep": "rows"}, {"every": 2}, {"dtype": "float32"}, {"exclude": "0"}])
def test_ranks_record_the_same(ranks, path, settings):
    results = ranks.attempt(rank_faults.settings_of_ranks, path, {}, settings)
    on_both(results, "RecordingError", "other settings on rank 1 than on rank 0: '")


def test_record_on_one_rank_only_ends_with_a_message_in_time(path):
    from two_ranks import TwoRanks

    pool = TwoRanks()
    try:
        said, _ = pool.attempt(rank_faults.only_rank_0_records, path)
    finally:
        pool.close()
    error, warning = said
    assert "call dualform.record() on every rank" in error
    assert "within 2 seconds (timeout= of init_process_group())" in error
    assert "must be called on every rank. It waits 2 seconds" in warning
    assert not path.exists()


def test_a_rank_that_ends_early_is_told_of(path):
    from two_ranks import TwoRanks

    pool = TwoRanks()
    try:
        results = pool.attempt(rank_faults.ends_early, path)
    finally:
        pool.close()
    assert results[1].kind == "Died"
    assert results[0].kind == "RecordingError"
    assert "got no answer from all 2 ranks before this update. Another rank has ended" in results[0].message


def test_only_a_recording_is_replaced_and_only_if_told(ranks, recorded, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(recorded, path)
    (path / "notes.txt").write_text("mine")
    results = ranks.attempt(rank_faults.again, path)
    assert (results[0].kind, results[1].kind) == ("StoreExistsError", "RecordingError")
    assert "overwrite=True" in results[1].message
    ranks.run(rank_faults.again, path, overwrite=True)
    assert (path / "notes.txt").read_text() == "mine"
    assert dualform.open(path).verify().passed
    with pytest.raises(StoreExistsError, match="holds a recording already"):
        on_one_rank(CASE, path)
    on_one_rank(CASE, path, overwrite=True)
    assert not list(path.glob("rank-*"))
    assert not (path / "run.json").exists()
    assert dualform.open(path).info()["ranks"] == 1


def test_a_resumed_run_is_one_run(ranks, path):
    ranks.run(rank_faults.sealed_and_resumed, path)
    dual = dualform.open(path)
    assert dual.end_step == CASE.steps
    assert dual.verify().passed
    assert dual.rows["step"].to_list() == sorted(dual.rows["step"].to_list())


def test_resuming_needs_as_many_ranks(ranks, recorded, tmp_path):
    path = tmp_path / "run"
    on_one_rank(CASE, path)
    on_both(ranks.attempt(rank_faults.resumed, path), "RecordingError", "recorded by 1 process, and now there are 2")
    with pytest.raises(RecordingError, match="was recorded by 2 ranks"):
        on_one_rank(CASE, recorded, resume=True)


def test_a_shard_alone_says_where_the_run_is(recorded):
    with pytest.raises(StoreError, match=r"what rank 1 of 2 ranks has recorded.*Open the folder of the run"):
        dualform.open(recorded / "rank-1")


def test_a_foreign_shard_is_noticed(ranks, recorded, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(recorded, path)
    shutil.rmtree(path / "rank-1")
    shutil.copytree(path / "rank-0", path / "rank-1")
    with pytest.raises(StoreDamagedError, match="not what rank 1 has recorded"):
        dualform.open(path)
    shutil.rmtree(path / "rank-1")
    with pytest.raises(StoreError, match="rank-1"):
        dualform.open(path)


def test_a_damaged_run_file_is_noticed(recorded, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(recorded, path)
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(text.replace('"ranks": 2', '"ranks": 1'))
    with pytest.raises(StoreDamagedError, match="its checksum does not fit"):
        dualform.open(path)
    (path / "run.json").write_text(text.replace('"version": 1', '"version": 9'))
    with pytest.raises(StoreError, match="version 9"):
        dualform.open(path)


def test_what_all_ranks_have_sealed_opens_after_one_was_killed(path):
    from two_ranks import TwoRanks

    pool = TwoRanks()
    try:
        results = pool.attempt(rank_faults.killed, path)
    finally:
        pool.close()
    assert results[1].kind == "Died"
    dual = dualform.open(path)
    assert dual.end_step >= 2
    assert dual.info()["ended"].startswith("not yet, or killed")
    certificate = dual.at(2).verify()
    assert certificate.passed, str(certificate)
    assert dual.rows.height == 6 * dual.end_step
    assert torch.isfinite(next(iter(dual.store.snapshot(2)[f"model.{n}"] for n in ("0.weight",)))).all()
