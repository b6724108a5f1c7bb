"""Stores larger than the memory that a question may take."""

import subprocess
import sys
from pathlib import Path

import pytest

import dualform
from dualform.store import reader

BENCH = Path(__file__).parents[1] / "bench"

QUESTIONS = """
import sys, threading, time
import torch, polars as pl, dualform
from torch import nn

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) // 1024

torch.set_num_threads(2)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(1000, 500)
    def forward(self, x):
        return self.map(x)
dual = dualform.open(sys.argv[1], Model())
dual.rows, dual.store.updates
torch.randn(500, 500) @ torch.randn(500, 500)
before = peak = anonymous()
running = True
def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
x = torch.randn(64, 1000)
attention = dual.attend(x)["map"]
attention.top(10)
attention.top(10, by="sample_id")
attention.total("label", absolute=True)
for some in attention.scores(where=pl.col("label") == 3):
    pass
dual.contributions(x, target=3)["map"].top(10)
dual.masked(drop=pl.col("label") == 3)
dual.verify()
running = False
print(peak - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """1.2 GB: more than twice the bound."""
    sys.path.insert(0, str(BENCH))
    try:
        import synthetic
    finally:
        sys.path.remove(str(BENCH))
    folder = tmp_path_factory.mktemp("large") / "run"
    synthetic.write(folder, slots=200_000, d_in=1000, d_out=500)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure memory")
def test_questions_stay_within_their_memory(large):
    assert dualform.open(large).store.nbytes > 1.1e9
    out = subprocess.run(
        [sys.executable, "-c", QUESTIONS, str(large)], capture_output=True, text=True, check=False, timeout=900
    )
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) <= 512, f"{out.stdout} MB beyond what was there"


def test_opening_reads_the_manifest_and_nothing_else(large, monkeypatch):
    monkeypatch.setattr(reader, "TensorFile", lambda *_: pytest.fail("a tensor file was opened"))
    monkeypatch.setattr(reader.pl, "read_parquet", lambda *_: pytest.fail("a table was read"))
    assert dualform.open(large).end_step > 0
