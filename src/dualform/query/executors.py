"""Where the tasks of a scan run: in the thread that asks, on any executor, in processes of our own, or on Ray.

Results come back in the order of the tasks, whichever of them ends first, so that what is merged rounds the same everywhere.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dualform.dual.threads import awaited
from dualform.errors import QuestionError, WorkersLostError
from dualform.progress import Progress
from dualform.query.sending import Packed, Packer, Sendable, run_packed

TASKS_AHEAD = 8
"""How many tasks are handed to an executor before the result of the first is merged. Two for each worker, if that is more."""
MOST_LOSSES = 3
"""A task is given up when as many workers were lost while its result was awaited."""


class Backend(Protocol):
    """Runs tasks."""

    shares_memory: bool
    """Whether tasks run in the process that asks, which then has its indexes at hand."""

    def run(self, tasks: Iterable[Sendable]) -> Generator[Any, None, None]:
        """Yield the result of each task, in their order. A caller that stops early cancels the rest."""

    def close(self) -> None:
        """End what was started for tasks."""


@dataclass(frozen=True)
class Runner:
    """A place where tasks run, and who is told how far they are."""

    backend: Backend
    progress: Progress | None = None

    def reporting(self, progress: Progress | None) -> Runner:
        """Return the same place, which reports the progress of scans, too. Those of the asking thread do not report."""
        if progress is None or isinstance(self.backend, InThisThread):
            return self
        return Runner(self.backend, progress)


class InThisThread:
    """Runs tasks one after the other where the question is asked."""

    shares_memory = True

    def run(self, tasks: Iterable[Sendable]) -> Generator[Any, None, None]:
        """Yield the result of each task."""
        for task in tasks:
            yield task.run()

    def close(self) -> None:
        """Nothing was started."""


HERE = Runner(InThisThread())


class OnExecutor:
    """Runs tasks on an executor. One of threads gets them as they are; to any other they are sent."""

    def __init__(self, executor: Executor, *, is_own: bool = False):
        """is_own: whether `close` shuts the executor down."""
        self._executor = executor
        self._is_own = is_own
        self.shares_memory = isinstance(executor, ThreadPoolExecutor)
        # Those of the standard library do not tell it in public
        self._workers: int = getattr(executor, "_max_workers", 1)

    def run(self, tasks: Iterable[Sendable]) -> Generator[Any, None, None]:
        """Yield the result of each task."""
        packer = Packer()
        waiting: deque[Future[Any]] = deque()
        ahead = max(TASKS_AHEAD, 2 * self._workers)
        try:
            for task in tasks:
                waiting.append(self._submit(task, packer))
                if len(waiting) > ahead:
                    yield self._result(waiting.popleft(), packer)
            while waiting:
                yield self._result(waiting.popleft(), packer)
        finally:
            for future in waiting:
                future.cancel()

    def _submit(self, task: Sendable, packer: Packer) -> Future[Any]:
        if self.shares_memory:
            return self._executor.submit(task.run)
        packed = packer.pack(task)
        return self._executor.submit(run_packed, packed.content, *packed.shared)

    def _result(self, future: Future[Any], packer: Packer) -> Any:
        result = awaited(future)
        return result if self.shares_memory else packer.unpack(result)

    def close(self) -> None:
        """Shut the executor down if it was made here."""
        if self._is_own:
            self._executor.shutdown()


@dataclass
class _Sent:
    """A task whose result has not come back."""

    packed: Packed
    pool: ProcessPoolExecutor
    future: Future[bytes]


class Processes:
    """Runs tasks in processes of our own, which begin with the first task. A process that dies is replaced, and its tasks run again."""

    shares_memory = False

    def __init__(self, workers: int | None = None):
        """workers: how many processes; default: one for each processor."""
        self._workers = workers or os.cpu_count() or 1
        self._lock = threading.Lock()
        self._pools: list[ProcessPoolExecutor] = []
        """The pool, once there is one."""
        self._finalizer = weakref.finalize(self, _stop_all, self._pools)

    def run(self, tasks: Iterable[Sendable]) -> Generator[Any, None, None]:
        """Yield the result of each task."""
        packer = Packer()
        waiting: deque[_Sent] = deque()
        ahead = max(TASKS_AHEAD, 2 * self._workers)
        try:
            for task in tasks:
                packed = packer.pack(task)
                waiting.append(_Sent(packed, *self._submit(packed)))
                if len(waiting) > ahead:
                    yield packer.unpack(self._first_result(waiting))
            while waiting:
                yield packer.unpack(self._first_result(waiting))
        except BaseException as error:
            for sent in waiting:
                sent.future.cancel()
            if not isinstance(error, Exception):  # Ctrl-C, or a caller that stopped: nobody waits for running tasks
                self.close()
            raise

    def _first_result(self, waiting: deque[_Sent]) -> bytes:
        for _ in range(MOST_LOSSES):
            try:
                result = awaited(waiting[0].future)
            except (BrokenProcessPool, CancelledError):  # another thread that asks may have replaced the pool
                self._send_again(waiting)
                continue
            waiting.popleft()
            return result
        raise self._lost()

    def _send_again(self, waiting: deque[_Sent]) -> None:
        """Send what was lost with a pool to a new one."""
        for sent in waiting:
            if not _has_result(sent.future):
                self._drop(sent.pool)
                sent.pool, sent.future = self._submit(sent.packed)

    def _submit(self, packed: Packed) -> tuple[ProcessPoolExecutor, Future[bytes]]:
        for _ in range(MOST_LOSSES):
            pool = self._pool()
            try:
                return pool, pool.submit(run_packed, packed.content, *packed.shared)
            except RuntimeError:  # it is broken, or another thread that asks has just replaced it
                self._drop(pool)
        raise self._lost()

    def _lost(self) -> WorkersLostError:
        return WorkersLostError(
            f"worker processes died {MOST_LOSSES} times at the same task. They may lack memory (use fewer workers, or ask about fewer "
            f'queries at a time); or the script that asks needs the line `if __name__ == "__main__":` around what it does, because '
            f"worker processes import it."
        )

    def _pool(self) -> ProcessPoolExecutor:
        with self._lock:
            if not self._pools:
                context = multiprocessing.get_context("spawn")  # Polars does not survive a fork
                self._pools.append(ProcessPoolExecutor(self._workers, context, initializer=_begin_worker))
            return self._pools[0]

    def _drop(self, pool: ProcessPoolExecutor) -> None:
        """Stop a pool that is broken, unless that has been done."""
        with self._lock:
            if pool not in self._pools:
                return
            self._pools.remove(pool)
        _stop(pool)

    def close(self) -> None:
        """End all processes, whatever they are doing. A later question starts others."""
        with self._lock:
            pools = list(self._pools)
            self._pools.clear()
        for pool in pools:
            _stop(pool)


def _has_result(future: Future[bytes]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _begin_worker() -> None:
    """Prepare a worker process."""
    # Ctrl-C reaches all processes of a terminal. The one that asks ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One worker for each processor: threads of their own would only be in each other's way
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that started it was killed: nobody else would."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _stop_all(pools: list[ProcessPoolExecutor]) -> None:
    while pools:
        _stop(pools.pop())


def _stop(pool: ProcessPoolExecutor) -> None:
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        with contextlib.suppress(ValueError):  # it is closed already
            process.terminate()
    pool.shutdown(wait=True)


def _on_ray() -> Backend:
    from dualform.query.on_ray import OnRay

    return OnRay()


_BY_NAME: dict[str, Callable[[], Backend]] = {
    "threads": lambda: OnExecutor(ThreadPoolExecutor(), is_own=True),
    "processes": Processes,
    "ray": _on_ray,
}


def runner_of(given: str | Executor | Runner | None) -> Runner:
    """Return where tasks run, as users say it."""
    if given is None:
        return HERE
    if isinstance(given, Runner):
        return given
    if isinstance(given, Executor):
        return Runner(OnExecutor(given))
    if given not in _BY_NAME:
        raise QuestionError(
            f"executor={given!r}: expected {', '.join(map(repr, _BY_NAME))}, a concurrent.futures.Executor, or None for the thread that asks."
        )
    return Runner(_BY_NAME[given]())
