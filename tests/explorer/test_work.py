"""Bounded work."""

import asyncio
import threading
import time

import pytest
from pydantic import BaseModel

from dualform.explorer import work
from dualform.explorer.keeping import Kept
from dualform.explorer.work import BusyError, Desk, Jobs


class Found(BaseModel):
    value: int


async def nobody_leaves():
    return False


def wait_until(condition):
    for _ in range(400):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not happen")


def test_at_most_two_questions_at_a_time():
    desk, most, running, lock = Desk(), 0, 0, threading.Lock()

    def question():
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return 1

    async def ask():
        return await asyncio.gather(*(desk.ask(question, nobody_leaves) for _ in range(20)))

    assert asyncio.run(ask()) == [1] * 20
    assert most <= work.WORKERS
    desk.close()


def test_a_queue_that_is_full_says_so(monkeypatch):
    monkeypatch.setattr(work, "QUEUE", 3)
    desk, go = Desk(), threading.Event()

    async def ask():
        waiting = [asyncio.ensure_future(desk.ask(go.wait, nobody_leaves)) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(BusyError, match="too many"):
            await desk.ask(go.wait, nobody_leaves)
        go.set()
        await asyncio.gather(*waiting)

    asyncio.run(ask())
    desk.close()


def test_who_has_gone_is_not_answered():
    desk, go, asked = Desk(), threading.Event(), []

    async def gone():
        return True

    async def ask():
        busy = [asyncio.ensure_future(desk.ask(lambda: go.wait(60), nobody_leaves)) for _ in range(work.WORKERS)]
        await asyncio.sleep(0.05)
        assert await desk.ask(lambda: asked.append(1), gone) is None
        go.set()
        await asyncio.gather(*busy)

    asyncio.run(ask())
    desk.close()
    assert asked == []


def test_what_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(work, "PATIENCE", 0.1)
    desk, go = Desk(), threading.Event()

    async def ask():
        with pytest.raises(BusyError, match="longer than"):
            await desk.ask(lambda: go.wait(60), nobody_leaves)
        go.set()

    asyncio.run(ask())
    desk.close()


def test_a_job_tells_how_far_it_is_and_ends():
    jobs, go = Jobs(), threading.Event()

    def slow(progress):
        progress("counting", 3, 7)
        go.wait(60)
        return Found(value=4)

    job = jobs.start("test", slow)
    wait_until(lambda: job.total == 7)
    assert (job.form().what, job.form().done, job.form().state) == ("counting", 3, "running")
    go.set()
    wait_until(lambda: job.state == "done")
    assert job.form().result == {"value": 4}
    jobs.close()


def test_a_job_is_cancelled_at_its_next_word():
    jobs, went_on = Jobs(), []

    def endless(progress):
        for step in range(100_000):
            progress("running", step, 100_000)
            time.sleep(0.001)
        went_on.append(1)
        return Found(value=1)

    job, other = jobs.start("test", endless), jobs.start("test", endless)
    wait_until(lambda: job.done > 0)
    jobs.cancel(other.id)
    jobs.cancel(job.id)
    wait_until(lambda: job.state == "cancelled" and other.state == "cancelled")
    assert went_on == []
    jobs.close()


def test_a_job_that_fails_says_why():
    jobs = Jobs()

    def wrong(progress):
        raise ValueError("no such thing")

    job = jobs.start("test", wrong)
    wait_until(lambda: job.state == "failed")
    assert "no such thing" in job.problem
    jobs.close()


def test_old_jobs_are_forgotten_and_too_many_refused():
    jobs, go = Jobs(), threading.Event()
    first = jobs.start("test", lambda progress: Found(value=0))
    for _ in range(work.JOBS):
        job = jobs.start("test", lambda progress: Found(value=1))
        wait_until(lambda job=job: job.state == "done")
    assert jobs.get(first.id) is None
    with pytest.raises(BusyError, match="too many jobs"):
        for _ in range(work.JOBS):
            jobs.start("test", lambda progress: (go.wait(60), Found(value=1))[1])
    go.set()
    jobs.close()


def test_what_is_kept_is_bounded_and_computed_once():
    kept, computed = Kept(10, len), []

    def make(text):
        computed.append(text)
        return text

    for text in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb"):
        assert kept.get(text, lambda text=text: make(text)) == text
    assert computed == ["aaaa", "bbbb", "cccc", "bbbb"]
    assert kept.nbytes <= 10
    assert kept.get("long", lambda: "x" * 11) == "x" * 11
    assert "long" not in kept
    with pytest.raises(ValueError, match="no"):
        kept.get("error", lambda: (_ for _ in ()).throw(ValueError("no")))


def test_two_that_ask_for_the_same_wait_for_one():
    kept, computed, go = Kept(100, len), [], threading.Event()

    def slow():
        computed.append(1)
        go.wait(60)
        return "found"

    threads = [threading.Thread(target=kept.get, args=("key", slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: computed)
    go.set()
    for thread in threads:
        thread.join()
    assert computed == [1]
