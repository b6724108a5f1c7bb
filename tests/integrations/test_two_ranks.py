"""Trainer and Lightning under torchrun: rows have the names of the samples that each rank was trained on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dualform

SCRIPT = Path(__file__).parent / "on_two_ranks.py"


def train(how, folder):
    """Train on two ranks. Returns which samples each of them saw."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        SCRIPT,
        how,
        folder,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


def network(how):
    if how == "lightning":
        from test_lightning import Classifier

        return Classifier()
    from tiny_language import gpt2

    return gpt2()


@pytest.mark.parametrize("how", ["trainer", "lightning"])
def test_recorded_ids_are_those_that_each_rank_saw(tmp_path, how):
    pytest.importorskip({"trainer": "transformers", "lightning": "lightning"}[how])
    seen = train(how, tmp_path)
    dual = dualform.open(tmp_path / "run", network(how))
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert certificate.rows["assumed"].is_null().all(), str(certificate)
    # Rows are in the order (step, rank)
    left = [list(samples) for samples in seen]
    backwards = dual.store.rows.group_by("step", maintain_order=True).agg("sample_id")["sample_id"].to_list()
    for samples in backwards:
        half = len(samples) // 2
        for mine, of_rank in zip(left, (samples[:half], samples[half:]), strict=True):
            assert mine[: len(of_rank)] == of_rank
            del mine[: len(of_rank)]
    assert left == [[], []]
