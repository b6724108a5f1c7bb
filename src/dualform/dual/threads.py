"""Threads for our own tasks, which divide PyTorch's threads among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def run_in_order(tasks: Iterable[Callable[[], T]], workers: int) -> Generator[T, None, None]:
    """Run tasks on several threads and yield their results in the order of the tasks.

    At most `workers` results wait for the ones before them, so that memory stays bounded.
    """
    waiting = deque[Future[T]]()
    with thread_pool(workers) as pool:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) == 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def thread_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads, each with its share of PyTorch's threads. Tasks that have not begun at the end of the block are dropped."""
    threads = torch.get_num_threads()
    share = max(1, threads // workers)
    torch.set_num_threads(share)
    # Each new thread must set it too: the matrix library does not inherit the setting.
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
