"""The library that counts system calls, lets them fail and kills processes at them."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def run(tmp_path):
    """Run a program that has `Interference` and a folder to write to; gives its exit status and what it printed."""

    def run(program):
        script = tmp_path / "program.py"
        beginning = f"""
            import errno, json, os, sys
            sys.path.insert(0, {str(BENCH)!r})
            from pathlib import Path
            from campaigns import system_calls
            from campaigns.system_calls import *
            from campaigns.disk import read_trace
            system_calls.preload()
            folder = Path({str(tmp_path / "watched")!r})
        """
        script.write_text(textwrap.dedent(beginning) + textwrap.dedent(program))
        (tmp_path / "watched").mkdir()
        found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
        return found.returncode, found.stdout, found.stderr

    return run


def test_calls_below_the_folder_are_counted_and_others_are_not(run):
    status, out, error = run("""
        watched = Interference()
        watched.begin(folder)
        (folder / "file").write_bytes(b"12")
        (folder / "file").rename(folder / "other")
        (folder / "other").unlink()
        Path("/tmp").joinpath(f"unwatched-{os.getpid()}").write_bytes(b"1")
        Path("/tmp").joinpath(f"unwatched-{os.getpid()}").unlink()
        print(watched.calls)
    """)
    assert status == 0, error
    assert int(out) == 4  # create, write, rename, unlink


@pytest.mark.parametrize("persistent", [False, True])
def test_a_call_fails(run, persistent):
    status, out, error = run(f"""
        failing = Interference(2, FAIL, error=errno.EIO, persistent={persistent})
        failing.begin(folder)
        said = []
        for number in range(3):
            try:
                descriptor = os.open(folder / str(number), os.O_CREAT | os.O_WRONLY)
                said.append(0)
            except OSError as error:
                said.append(error.errno)
        failing.stop()
        print(json.dumps([said, failing.kind, Path(failing.path).name]))
    """)
    assert status == 0, error
    assert json.loads(out) == [[0, errno.EIO, errno.EIO if persistent else 0], "create", "1"]


def test_half_of_a_write_is_written(run, tmp_path):
    status, out, error = run("""
        Interference(2, SHORT).begin(folder)
        descriptor = os.open(folder / "file", os.O_CREAT | os.O_WRONLY)
        print(os.write(descriptor, b"12345678"))
    """)
    assert status == 0, error
    assert int(out) == 4
    assert (tmp_path / "watched" / "file").read_bytes() == b"1234"


@pytest.mark.parametrize(
    ("action", "left"), [("KILL_BEFORE", b""), ("KILL_INSIDE", b"1234"), ("KILL_AFTER", b"12345678")]
)
def test_a_process_is_killed_at_a_call(run, tmp_path, action, left):
    status, _, error = run(f"""
        Interference(2, {action}).begin(folder)
        descriptor = os.open(folder / "file", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"12345678")
        os.write(descriptor, b"more")
    """)
    assert status == -9, error
    assert (tmp_path / "watched" / "file").read_bytes() == left


def test_writes_of_polars_are_seen(run):
    status, out, error = run("""
        import polars as pl
        trace = os.open(folder.with_name("trace"), os.O_RDWR | os.O_CREAT)
        Interference().begin(folder, trace)
        pl.DataFrame({"a": [1, 2, 3]}).write_parquet(folder / "table")
        calls = list(read_trace(folder.with_name("trace").read_bytes()))
        print(b"".join(call.data for call in calls) == (folder / "table").read_bytes())
    """)
    assert status == 0, error
    assert out.strip() == "True"
    assert os.environ.get("LD_PRELOAD", "") == ""
