"""A full disk, readers beside a writer, two processes: what the campaigns of tests/test_torture.py do not reach."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import StoreExistsError, WriterError
from dualform.store import files


def run(script, *arguments):
    found = subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def training(path, **settings):
    """A recorder, and a function that trains one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = dualform.record(model, optimizer, path, **settings)
    x, y = torch.randn(9, 6), torch.arange(9) % 3

    def step():
        recorder.batch(sample_id=range(9), label=y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, recorder, step


def full_disk(monkeypatch, after):
    """From the n-th write on, the disk is full."""
    written, write = 0, files.write_pieces

    def limited(descriptor, pieces):
        nonlocal written
        written += 1
        if written > after:
            raise OSError(28, "No space left on device")
        return write(descriptor, pieces)

    monkeypatch.setattr(files, "write_pieces", limited)


@pytest.mark.parametrize("after", [30, 47, 100])
def test_a_full_disk_ends_recording_with_a_clear_error_and_a_store_that_opens(tmp_path, monkeypatch, after):
    full_disk(monkeypatch, after)
    model, recorder, step = training(tmp_path / "run", chunk_bytes=2000)
    done = 0
    with pytest.raises(WriterError, match=r"No space left.*holds what was sealed before"), recorder:
        for _ in range(10_000):
            step()
            done += 1
    monkeypatch.undo()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.end_step <= done
    assert not [verdict for verdict in dual.verify().frame["verdict"] if verdict == "fail"]
    dual.attend(torch.zeros(1, 6))["2"].top(5)


def test_a_full_disk_need_not_end_the_training(tmp_path, monkeypatch):
    full_disk(monkeypatch, 40)
    model, recorder, step = training(tmp_path / "run", chunk_bytes=2000, on_write_error="stop")
    before = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="recording has stopped, the training goes on.*No space left"):
        with recorder:
            for _ in range(400):
                step()
    assert not torch.equal(before, model[0].weight)
    assert not model[0]._forward_hooks
    monkeypatch.undo()
    assert 0 < dualform.open(tmp_path / "run", model).end_step < 400


def test_a_limit_on_file_size_set_by_the_system(tmp_path):
    """Not simulated: the kernel refuses the write."""
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource, signal, sys\n"
        "import torch, dualform\n"
        "from torch import nn\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "model = nn.Linear(400, 400)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "recorder = dualform.record(model, optimizer, sys.argv[1], chunk_bytes=4_000_000)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        "try:\n"
        "    with recorder:\n"
        "        for step in range(1000):\n"
        "            recorder.batch(sample_id=range(64))\n"
        "            optimizer.zero_grad()\n"
        "            model(torch.randn(64, 400)).sum().backward()\n"
        "            optimizer.step()\n"
        "except dualform.errors.WriterError as error:\n"
        "    print(error)\n"
    )
    out = run(script, tmp_path / "run")
    assert "File too large" in out
    assert dualform.open(tmp_path / "run").end_step == 0


def test_reading_while_it_is_being_written(tmp_path):
    _, recorder, step = training(tmp_path / "run", chunk_bytes=2000)
    seen = []
    with recorder:
        for number in range(60):
            step()
            if number % 20 == 19:
                recorder.seal()
                seen.append(run_reader(tmp_path / "run"))
    assert seen == [20, 40, 60]


def run_reader(path):
    code = (
        f"import dualform; d = dualform.open({str(path)!r}); assert d.rows.height == 9 * d.end_step; print(d.end_step)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return int(out.stdout)


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    _, recorder, step = training(tmp_path / "run")
    step()
    for settings in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(StoreExistsError, match="being written by another recorder"):
            training(tmp_path / "run", **settings)
    with pytest.raises(StoreExistsError, match="another recorder"):
        dualform.build_totals(tmp_path / "run", "label")
    recorder.close()
    assert (tmp_path / "run" / "writer.lock").exists()  # stale: nobody holds it
    dualform.build_totals(tmp_path / "run", "label")
    training(tmp_path / "run", overwrite=True)[1].close()


def test_a_lock_left_by_a_killed_process_does_not_count(tmp_path):
    code = (
        "import os, dualform, torch; m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters());"
        f"dualform.record(m, o, {str(tmp_path / 'run')!r}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    model = nn.Linear(2, 2)
    assert dualform.open(tmp_path / "run", model).end_step == 0
    dualform.record(model, torch.optim.SGD(model.parameters()), tmp_path / "run", overwrite=True).close()
