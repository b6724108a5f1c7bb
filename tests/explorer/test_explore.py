"""`dual.explore()` and `dualform explore`."""

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
import runs
import torch
from clients import asked

import dualform
from dualform.errors import QuestionError


def test_from_python(tmp_path, capsys):
    dual, train, test, options = runs.hostile(tmp_path / "run")
    server = dual.explore(train=train, test=test, **options, browser=False, block=False)
    try:
        assert server.url in capsys.readouterr().out
        run = asked(server, "api/run").json()
        assert run["title"] == runs.HOSTILE
        assert [one["name"] for one in run["units"]] == options["class_names"]
        assert run["by"] == ["sample_id"]
    finally:
        server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by": "nothing"}, "there is no column 'nothing'"),
        ({"label": "nothing"}, "there is no such column"),
        ({"test": 5}, "expected an array"),
        ({"test": (torch.ones(3, 5), torch.ones(2))}, "there are 3 inputs and 2 labels"),
        ({"test": torch.ones(3, 4)}, r"does not take the first test example: RuntimeError.*as the model takes them"),
        ({"host": "256.1.1.1"}, "cannot listen on 256.1.1.1.*an address of this machine"),
    ],
)
def test_what_cannot_be_explored(trained, options, words):
    with pytest.raises(QuestionError, match=words):
        trained.dual.explore(**options, browser=False, block=False)


def test_tests_need_the_model(trained):
    with pytest.raises(QuestionError, match=r"needs the model: dualform.open\(path, model\)"):
        dualform.open(trained.path).explore(test=torch.ones(3, 5), browser=False, block=False)


def test_a_plain_run_with_its_own_arrays(trained):
    """Vectors, no class names, a column of text: everything by default."""
    inputs = torch.randn(6, 5, dtype=torch.float64)
    with trained.dual.explore(inputs, inputs, browser=False, block=False) as server:
        run = asked(server, "api/run").json()
        assert run["inputs"] == "vector"
        assert [group["column"] for group in run["groups"]] == ["label", "task"]
        change = asked(server, "api/edit", input="test:1", drop="task = 'late'").json()
        assert change["dropped_rows"] == 15


def test_from_the_command_line(folder):
    code = "from dualform.cli import app; app()"
    words = [sys.executable, "-c", code, "explore", str(folder), "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            line = process.stdout.readline()
            address, token = re.search(r"(http://127\.0\.0\.1:\d+/)\?token=(\S+)", line).groups()
            assert httpx.get(f"{address}api/log").status_code == 401
            assert httpx.get(f"{address}api/log", headers={"authorization": f"Bearer {token}"}).status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
