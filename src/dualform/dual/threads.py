"""Threads for our own tasks, which divide PyTorch's threads among them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from threading import Lock, local
from typing import TypeVar

import torch

T = TypeVar("T")
LISTENS_EVERY = 0.2
"""Seconds after which a thread that waits for another one looks whether Ctrl-C was pressed."""


def awaited(future: Future[T]) -> T:
    """Return the result of a future. Once Polars has been used, Ctrl-C does not wake a thread that waits without a time limit."""
    while not future.done():
        with contextlib.suppress(FutureTimeoutError):  # before Python 3.11, not the builtin one
            future.result(LISTENS_EVERY)
    return future.result()


def run_in_order(tasks: Iterable[Callable[[], T]], workers: int) -> Generator[T, None, None]:
    """Run tasks on several threads and yield their results in the order of the tasks.

    At most `workers` results wait for the ones before them, so that memory stays bounded.
    """
    waiting = deque[Future[T]]()
    with thread_pool(workers) as pool:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) == 2 * workers:
                yield awaited(waiting.popleft())
        while waiting:
            yield awaited(waiting.popleft())


class _ThreadCount:
    """How many threads PyTorch uses outside of all pools.

    The setting belongs to the process. A thread that opens a pool while another pool is open must not take that pool's share for the
    number to restore.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._open_pools = 0
        self._outside = 0
        self._worker = local()

    def enter(self) -> int:
        """Open a pool; return the number of threads of the calling thread, to be restored."""
        with self._lock:
            if not self._open_pools:
                self._outside = torch.get_num_threads()
            self._open_pools += 1
            return getattr(self._worker, "share", self._outside)

    def leave(self, threads: int) -> None:
        """Close a pool and restore the number of threads."""
        with self._lock:
            self._open_pools -= 1
            torch.set_num_threads(threads)

    def begin_worker(self, share: int) -> None:
        """Called in each new worker: the matrix library does not inherit the setting."""
        self._worker.share = share
        torch.set_num_threads(share)


_THREAD_COUNT = _ThreadCount()


@contextmanager
def thread_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads, each with its share of PyTorch's threads. Tasks that have not begun at the end of the block are dropped.

    Blocks may be nested, and several threads may be in one at the same time.
    """
    threads = _THREAD_COUNT.enter()
    share = max(1, threads // workers)
    torch.set_num_threads(share)
    pool = ThreadPoolExecutor(workers, initializer=_THREAD_COUNT.begin_worker, initargs=(share,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        _join(pool)
        _THREAD_COUNT.leave(threads)


def _join(pool: ThreadPoolExecutor) -> None:
    """Wait until the running tasks have ended: they use PyTorch's threads. A second Ctrl-C does not wait."""
    for thread in pool._threads:
        while thread.is_alive():
            thread.join(LISTENS_EVERY)
