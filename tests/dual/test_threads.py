import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dualform.dual.threads import run_in_order, thread_pool


def test_results_come_in_order():
    def task(n):
        return lambda: (time.sleep(0.01 * (n % 3)), n)[1]

    assert list(run_in_order(map(task, range(9)), 3)) == list(range(9))


def test_at_most_workers_run_and_as_many_results_wait():
    lock, now, most, begun = threading.Lock(), 0, 0, 0

    def task():
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with lock:
            now -= 1

    def tasks():
        nonlocal begun
        for _ in range(12):
            begun += 1
            yield task

    for done, _ in enumerate(run_in_order(tasks(), 2)):
        assert begun - done <= 4
    assert most == 2


def test_an_error_in_one_task_cancels_the_others():
    ran = []

    def fails():
        raise ValueError("in a thread")

    before = torch.get_num_threads()
    others = set(threading.enumerate())
    with pytest.raises(ValueError, match="in a thread"):
        list(run_in_order([fails, *[lambda: (time.sleep(0.01), ran.append(1))] * 8], 2))
    assert len(ran) < 8
    assert torch.get_num_threads() == before
    assert set(threading.enumerate()) <= others


INTERRUPTED = """
import signal, time
import polars as pl
from dualform.dual.threads import run_in_order

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started without
pl.DataFrame({"a": range(100_000)}).group_by("a").len()
ended = []

def task(seconds):
    print("begun", flush=True)
    time.sleep(seconds)
    ended.append(1)

try:
    # The first result is awaited for so long that all others would have been computed
    list(run_in_order([lambda: task(6), *[lambda: task(1)] * 3], 2))
except KeyboardInterrupt:
    print("interrupted after", len(ended))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the signals of POSIX")
def test_ctrl_c_is_heard_while_tasks_run():
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True) as process:
        begun = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert begun == ["begun\n"] * 2
    assert said == "interrupted after 2\n"  # those that ran; no other one has begun


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def thread_counts():
    """What PyTorch, OpenMP and the matrix library report in the thread that asks."""
    lines = torch.__config__.parallel_info().splitlines()
    return {int(line.split(":")[-1]) for line in lines if "get_num_threads" in line or "get_max_threads" in line}


@pytest.mark.parametrize(("workers", "share"), [(2, 2), (3, 1), (4, 1), (8, 1)])
def test_workers_divide_the_threads_of_pytorch(four_threads, workers, share):
    with thread_pool(workers) as pool:
        assert {*pool.submit(thread_counts).result(), *thread_counts()} == {share}
    assert thread_counts() == {4}


def test_threads_are_given_back_after_an_error(four_threads):
    with pytest.raises(ZeroDivisionError), thread_pool(2) as pool:
        pool.submit(lambda: 1 // 0).result()
    assert thread_counts() == {4}


def test_blocks_may_be_nested(four_threads):
    def inner():
        with thread_pool(2) as pool:
            within = pool.submit(thread_counts).result()
        return within, thread_counts()

    with thread_pool(2) as pool:
        assert pool.submit(inner).result() == ({1}, {2})
    assert thread_counts() == {4}


def test_blocks_of_several_threads_leave_no_trace(four_threads):
    """A thread that begins while another one shares threads out does not take its share for the whole."""
    entered, leave = threading.Event(), threading.Event()

    def first():
        with thread_pool(4):
            entered.set()
            leave.wait()

    def second():
        with thread_pool(2) as pool:
            share = pool.submit(thread_counts).result()
            leave.set()
            one.join()
        return share, thread_counts()

    one = threading.Thread(target=first)
    one.start()
    entered.wait()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(second).result() == ({2}, {4})
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(thread_counts).result() >= {4}
