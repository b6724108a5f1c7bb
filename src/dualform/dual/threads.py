"""Threads of our own: PyTorch's, which it uses within an operation, are shared out among them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def shared_out(workers: int) -> Iterator[ThreadPoolExecutor]:
    """So many workers, until the end of the block; what has not begun by then is not done."""
    threads = torch.get_num_threads()
    share = max(1, threads // workers)
    torch.set_num_threads(share)
    # In each of them, too: a new thread hears of it, but not the library that multiplies matrices there
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
