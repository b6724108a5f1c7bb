import pytest
import tiny
import torch

from dualform.errors import QuestionError
from dualform.evaluate.fewer import RANDOM, SEED, leave_few_out


def test_the_target_falls_by_what_training_without_them_says(recorded, tmp_path):
    study = tiny.study()
    few = leave_few_out(recorded, study, 6, out=tmp_path / "kept", examples=3, repeats=2, views=["kernel"])
    assert few.estimate().trainings == 2 * (1 + 2 * 3) - 2
    frame = few.run()
    assert frame["view"].to_list() == [RANDOM, "kernel"]
    ids = torch.arange(tiny.SAMPLES)
    for name, fall in frame.select("view", "fall").rows():
        falls = []
        for example, places in enumerate(few.out[name].tolist()):
            left = torch.tensor([i for i in range(tiny.SAMPLES) if i not in places])
            for repeat in range(2):
                whole, without = (study.judge(tiny.train(some, SEED + repeat))[example] for some in (ids, left))
                falls.append(float(whole - without))
        assert fall == pytest.approx(sum(falls) / len(falls), abs=1e-6)
    assert frame["fall"][1] > frame["fall"][0]


def test_refusals(recorded):
    for wrong in ({"k": tiny.SAMPLES}, {"k": 0}, {"k": 3, "examples": tiny.TESTS + 1}, {"k": 3, "repeats": 0}):
        with pytest.raises(QuestionError, match="expected at least one of each"):
            leave_few_out(recorded, tiny.study(), **wrong)
