"""Tasks on Ray: on the cluster that RAY_ADDRESS names, else on one that is started on this machine.

Ray gets tasks, queries and results. Slots are read by the task that scores them, and never pass through Ray's object store. Tasks whose worker
died are run again by Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from dualform.errors import QuestionError, WorkersLostError
from dualform.query.sending import Packer, Sendable, run_packed

LOOPBACK = "127.0.0.1"
STORE_BYTES = 80 << 20
"""Of the object store on this machine, which holds queries and results. Ray accepts no less than 75 MB."""
TASK_BYTES = 1 << 30
"""The memory that a task declares: a worker with PyTorch, what it decodes at a time, and the scores of a block of queries."""
RETRIES = 3
"""A task is run again this many times when its worker dies."""
TASKS_AHEAD = 3
"""Tasks for each processor that are handed to Ray before the result of the first is merged."""


class OnRay:
    """Runs tasks on Ray."""

    shares_memory = False

    def __init__(self) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise ModuleNotFoundError("executor=\"ray\" needs Ray: pip install 'dualform[ray]'.", name="ray") from None
        self._ray: Any = ray
        self._is_own = not ray.is_initialized()
        if self._is_own:
            _start(ray)
        self._check_memory()
        self._task = ray.remote(run_packed).options(num_cpus=1, memory=TASK_BYTES, max_retries=RETRIES)

    def _check_memory(self) -> None:
        """Refuse a cluster on which no task could ever begin: Ray would wait."""
        most = max((node["Resources"].get("memory", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        if most < TASK_BYTES:
            raise QuestionError(
                f'executor="ray": a task needs {TASK_BYTES >> 20} MB, but no machine of the cluster offers Ray more than '
                f'{int(most) >> 20} MB. Start Ray with more (ray start --memory), or use executor="processes".'
            )

    def run(self, tasks: Iterable[Sendable]) -> Generator[Any, None, None]:
        """Yield the result of each task."""
        packer = Packer(self._ray.put)
        ahead = TASKS_AHEAD * max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        try:
            for task in tasks:
                packed = packer.pack(task)
                waiting.append(self._task.remote(packed.content, *packed.shared))
                if len(waiting) > ahead:
                    yield packer.unpack(self._result(waiting.popleft()))
            while waiting:
                yield packer.unpack(self._result(waiting.popleft()))
        except BaseException as error:
            is_urgent = not isinstance(
                error, Exception
            )  # Ctrl-C, or a caller that stopped: nobody waits for running tasks
            for reference in waiting:
                self._ray.cancel(reference, force=is_urgent)
            raise

    def _result(self, reference: Any) -> bytes:
        errors = self._ray.exceptions
        try:
            result: bytes = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause from None
        except (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError) as error:
            raise WorkersLostError(
                f"Ray lost the worker of a task {RETRIES + 1} times: {str(error).splitlines()[0]} Ask about fewer queries at a time, or give "
                f"tasks more memory."
            ) from error
        return result

    def close(self) -> None:
        """End Ray, if it was started or connected to here."""
        if self._is_own:
            self._ray.shutdown()


def _start(ray: Any) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**quiet)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_IGNORE_UNHANDLED_ERRORS", "1"
    )  # the first error of a question is raised; the others say the same
    with _staying_on_loopback():
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _node_ip_address=LOOPBACK,
            **quiet,
        )


@contextlib.contextmanager
def _staying_on_loopback() -> Iterator[None]:
    """Keep Ray from taking this machine's public address for 127.0.0.1: whoever can connect to Ray can run code."""
    from ray._private import services

    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = resolve
