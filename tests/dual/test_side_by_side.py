import threading
import time

import pytest
import torch

from dualform.dual.side_by_side import each_rebuilt, run
from dualform.dual.weights import rebuilt
from dualform.errors import QuestionError


def test_results_come_in_order():
    def task(n):
        return lambda: (time.sleep(0.01 * (n % 3)), n)[1]

    assert list(run(map(task, range(9)), 3)) == list(range(9))


def test_not_more_than_is_allowed_at_a_time():
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

    for done, _ in enumerate(run(tasks(), 2)):
        assert begun - done <= 4
    assert most == 2


def test_an_error_ends_it_all():
    ran = []

    def fails():
        raise ValueError("in a thread")

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="in a thread"):
        list(run([fails, *[lambda: (time.sleep(0.01), ran.append(1))] * 8], 2))
    assert len(ran) < 8
    assert torch.get_num_threads() == before
    assert threading.active_count() == 1 or not any("ThreadPool" in t.name for t in threading.enumerate())


def test_numbers_as_coefficients_go_parameter_by_parameter(with_snapshots):
    store = with_snapshots.dual.store
    names = [p.name for p in store.manifest.parameters]
    for name, found in zip(names, each_rebuilt(store, names, end=24, workers=2), strict=True):
        assert torch.equal(found, rebuilt(store, name, begin=0, end=24))


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_workers(dual, workers):
    with pytest.raises(QuestionError, match=r"workers=.*whole number from 1 on"):
        dual.verify(workers=workers)


def test_progress_reaches_its_end(dual):
    for ask in (dual.verify, lambda **how: dual.masked(drop="label = 1", **how)):
        seen = []
        ask(workers=2, progress=lambda what, done, of, seen=seen: seen.append((done, of)))
        assert seen == [(done, 4) for done in range(5)]
