from functools import partial

import numpy as np
import pytest
import tiny
import torch

from dualform.errors import QuestionError, StudyError
from dualform.evaluate import retrain
from dualform.evaluate.retrain import Job, Retrained
from dualform.evaluate.subsets import Subsets

IDS = torch.arange(tiny.SAMPLES)


def test_outcomes_are_those_of_the_training(tmp_path):
    study, jobs = tiny.study(), Subsets(IDS, 3, 2).jobs()
    found = Retrained(study, tmp_path / "kept").outcomes(jobs)
    assert found.shape == (6, tiny.TESTS)
    for job, row in zip(jobs, found, strict=True):
        torch.testing.assert_close(row, study.judge(tiny.train(job.ids, job.seed)))


def test_what_is_there_is_not_trained_again(tmp_path):
    retrained = Retrained(tiny.study(), tmp_path / "kept")
    few = Subsets(IDS, 3, 1).jobs()
    retrained.outcomes(few[:1])
    assert retrained.estimate(few) == (0, pytest.approx(0))
    tiny.CALLS.clear()
    first = retrained.outcomes(few)
    assert tiny.CALLS == []
    told = []
    more = retrained.outcomes(Subsets(IDS, 5, 2).jobs(), lambda *step: told.append(step))
    assert len(tiny.CALLS) == 7  # more subsets and repetitions leave the first three as they are
    assert told[0] == ("retraining", 4, 10)
    assert told[-1] == ("retraining", 10, 10)
    torch.testing.assert_close(more[:3], first)


def test_an_estimate_keeps_the_trainings_that_it_is_made_from(tmp_path, monkeypatch):
    retrained, jobs = Retrained(tiny.study(), tmp_path / "kept"), Subsets(IDS, 5, 2).jobs()
    left = retrained.estimate(jobs)
    assert left.trainings == 8
    assert left.seconds > 0
    monkeypatch.setattr(retrain, "LONG", 0.0)
    assert retrained.estimate(jobs).trainings == 7
    tiny.CALLS.clear()
    retrained.outcomes(jobs)
    assert len(tiny.CALLS) == 7


def test_an_interruption_loses_nothing_that_was_done(tmp_path):
    def stop(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    retrained, jobs = Retrained(tiny.study(), tmp_path / "kept"), Subsets(IDS, 4, 1).jobs()
    with pytest.raises(KeyboardInterrupt):
        retrained.outcomes(jobs, stop)
    tiny.CALLS.clear()
    retrained.outcomes(jobs)
    assert len(tiny.CALLS) == 2


def test_other_processes_give_the_same(tmp_path):
    jobs = Subsets(IDS, 3, 1).jobs()
    here = Retrained(tiny.study(), tmp_path / "here").outcomes(jobs)
    study = tiny.study(samples=lambda ids: (ids, ids))  # stays here: no training needs it
    there = Retrained(study, tmp_path / "there", workers=2).outcomes(jobs)
    torch.testing.assert_close(here, there)


def test_the_callers_random_numbers_go_on_as_they_were(tmp_path):
    study = tiny.study()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Retrained(study, tmp_path / "kept").outcomes(Subsets(IDS, 3, 1).jobs())
    assert torch.equal(torch.rand(3), expected)


def test_a_folder_belongs_to_one_study(tmp_path):
    jobs = [Job(IDS, 0)]
    Retrained(tiny.study(), tmp_path / "kept").outcomes(jobs)
    inputs, _ = tiny.data()
    for changes in ({"inputs": inputs[: tiny.TESTS]}, {"train": tiny.Faster(1.0)}):
        with pytest.raises(StudyError, match="trainings of another study"):
            Retrained(tiny.study(**changes), tmp_path / "kept").outcomes(jobs)
    Retrained(tiny.study(train=tiny.Faster(1.0)), tmp_path / "fast").outcomes(jobs)
    with pytest.raises(StudyError, match="trainings of another study"):
        Retrained(tiny.study(train=tiny.Faster(2.0)), tmp_path / "fast").outcomes(jobs)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(StudyError, match="holds something else"):
        Retrained(tiny.study(), tmp_path / "other").outcomes(jobs)


def closing(setting):
    return lambda ids, seed: tiny.train(ids, seed) if setting is not None else None


@pytest.mark.parametrize(
    "made",
    [
        lambda lr: partial(tiny.Faster.__call__, tiny.Faster(1.0), seed=lr),
        lambda lr: partial(tiny.train, folder=lr),
        lambda lr: tiny.Faster(lr).__call__,
        lambda lr: closing(np.array([lr])),
    ],
)
def test_settings_count_wherever_a_function_has_them(tmp_path, made):
    one, same, other = (Retrained(tiny.study(train=made(lr)), tmp_path / "kept") for lr in (1.0, 1.0, 2.0))
    one.outcomes([])
    same.outcomes([])
    with pytest.raises(StudyError, match="trainings of another study"):
        other.outcomes([])


def test_what_cannot_travel_or_is_no_model_is_said(tmp_path):
    local = tiny.study(train=lambda ids, seed: tiny.train(ids, seed))
    with pytest.raises(StudyError, match="cannot be sent to other processes"):
        Retrained(local, tmp_path / "kept", workers=2).outcomes([Job(IDS, 0)])
    with pytest.raises(StudyError, match="gave float; expected the trained model"):
        Retrained(tiny.study(train=lambda ids, seed: 1.0), tmp_path / "none").outcomes([Job(IDS, 0)])
    with pytest.raises(StudyError, match="one number for each test example"):
        Retrained(tiny.study(target=lambda output: output), tmp_path / "all").outcomes([Job(IDS, 0)])


def test_subsets_are_random_halves_with_seeds_of_their_own():
    subsets = Subsets(IDS, 20, 3, seed=1)
    kept = subsets.kept()
    assert (kept.sum(1) == tiny.SAMPLES // 2).all()
    assert len({tuple(row.tolist()) for row in kept}) == 20
    jobs = subsets.jobs()
    assert len({job.seed for job in jobs}) == len(jobs) == 60
    assert torch.equal(jobs[25].ids, IDS[kept[5]])
    assert torch.equal(Subsets(IDS, 10, 3, seed=1).kept(), kept[:10])
    assert not torch.equal(Subsets(IDS, 20, 3, seed=2).kept(), kept)


@pytest.mark.parametrize("wrong", [{"count": 2}, {"repeats": 0}, {"fraction": 1.0}, {"fraction": 0.001}])
def test_subsets_that_make_no_sense(wrong):
    with pytest.raises(QuestionError, match="at least 3 subsets"):
        Subsets(IDS, **{"count": 5, "repeats": 1} | wrong)
