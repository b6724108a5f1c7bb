"""Bounded work: a few questions at a time, the others in a queue of limited length; long work as jobs that can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from dualform.errors import DualformError
from dualform.explorer.forms import JobForm
from dualform.progress import Progress

T = TypeVar("T")
WORKERS = 2
"""So many questions are answered at a time."""
QUEUE = 128
"""So many may wait."""
PATIENCE = 60.0
"""Seconds of work after which a question is given up."""
JOBS = 16
"""So many jobs are remembered, running ones included."""


class BusyError(Exception):
    """Too many questions, or one that takes too long."""


class Desk:
    """Answers questions on a few threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="explorer")
        self._waiting = 0

    def start(self, work: Callable[[], Any]) -> None:
        """Do something that nobody waits for; what goes wrong there shows when it is asked for."""

        def quietly() -> None:
            with contextlib.suppress(Exception):
                work()

        self._pool.submit(quietly)

    async def ask(self, question: Callable[[], T], gone: Callable[[], Awaitable[bool]]) -> T | None:
        """The answer; None if whoever asked has gone before it was their turn."""
        if self._waiting >= QUEUE:
            raise BusyError("too many questions at once; please try again in a moment.")
        self._waiting += 1
        began: list[float] = []

        def work() -> T:
            began.append(time.monotonic())
            return question()

        submitted = self._pool.submit(work)
        future = asyncio.wrap_future(submitted)
        try:
            while True:
                done, _ = await asyncio.wait({future}, timeout=0.25)
                if done:
                    return future.result()
                if await gone():
                    submitted.cancel()
                    return None
                if began and time.monotonic() - began[0] > PATIENCE:
                    submitted.cancel()
                    raise BusyError(f"this took longer than {PATIENCE:.0f} s and was given up.")
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Finish what runs, forget what waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class CancelledError(Exception):
    """The job was cancelled."""


@dataclass
class Job:
    """Long work."""

    kind: str
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    state: str = "waiting"
    what: str = ""
    done: int = 0
    total: int = 0
    problem: str = ""
    result: BaseModel | None = None
    stopped: threading.Event = field(default_factory=threading.Event)

    def progress(self, what: str, done: int, total: int) -> None:
        """Told by the work; the place where a job that was cancelled ends."""
        if self.stopped.is_set():
            raise CancelledError
        self.what, self.done, self.total = what, done, total

    def form(self) -> JobForm:
        """As plain data."""
        result: Any = None if self.result is None else self.result.model_dump(mode="json")
        return JobForm(
            id=self.id, kind=self.kind, state=self.state, what=self.what, done=self.done, total=self.total,  # type: ignore[arg-type]
            problem=self.problem, result=result,
        )  # fmt: skip


class Jobs:
    """Long work, one at a time; the latest are remembered."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="explorer-job")
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def start(self, kind: str, work: Callable[[Progress], BaseModel]) -> Job:
        """Begin; or wait until the job before is over."""
        running = [job for job in self._jobs.values() if job.state in ("waiting", "running")]
        if len(running) >= JOBS // 2:
            raise BusyError("too many jobs at once; cancel one, or wait.")
        job = Job(kind)
        self._jobs[job.id] = job
        finished = [id_ for id_, one in self._jobs.items() if one.state not in ("waiting", "running")]
        for id_ in finished[: max(0, len(self._jobs) - JOBS)]:
            del self._jobs[id_]
        self._pool.submit(self._run, job, work)
        return job

    def _run(self, job: Job, work: Callable[[Progress], BaseModel]) -> None:
        try:
            job.progress(job.kind, 0, 0)
            job.state = "running"
            job.result = work(job.progress)
            job.state = "done"
        except CancelledError:
            job.state = "cancelled"
        except (DualformError, OSError) as error:
            job.state, job.problem = "failed", str(error)
        except Exception as error:
            job.state, job.problem = "failed", f"{type(error).__name__}: {error}"

    def get(self, id_: str) -> Job | None:
        """A job by its name."""
        return self._jobs.get(id_)

    def cancel(self, id_: str) -> Job | None:
        """Ask a job to end at its next word of progress."""
        job = self._jobs.get(id_)
        if job is not None:
            job.stopped.set()
            if job.state == "waiting":
                job.state = "cancelled"
        return job

    def close(self) -> None:
        """Cancel everything."""
        for id_ in list(self._jobs):
            self.cancel(id_)
        self._pool.shutdown(wait=False, cancel_futures=True)
