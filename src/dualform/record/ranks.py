"""The processes (ranks) that train copies of one model with DistributedDataParallel, as a recording sees them.

Slots stay where they were captured. The ranks only exchange what all of them must know alike: small sums of projections, once for each
update, over a group of their own on the CPU, so that the training's own collectives are not disturbed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from dualform.errors import RecordingError
from dualform.projection import Projected
from dualform.store.shards import RANK, RANKS, shard_name

EXACT_HOOKS = ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook",)
"""Communication hooks that average gradients and change nothing else."""
JOINED = (
    "model.join() is not recorded: ranks that have run out of batches make updates of others, without an optimizer of their own. Give each "
    "rank the same number of batches: a DistributedSampler does so, by giving some samples twice or, with drop_last=True, by leaving some out"
)


WAITS_IN_SILENCE = 60.0
"""Seconds after which a rank says that it waits for the others in record()."""
_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The groups that recordings use, by those of DistributedDataParallel. A second recording uses the group of the first: PyTorch would find the
first one's addresses under the name of a second group of the same ranks."""


class Ranks:
    """The ranks of one DistributedDataParallel."""

    def __init__(self, model: nn.Module):
        """model: a DistributedDataParallel. Called on every rank, for a group of processes begins here."""
        from torch import distributed

        self._model = model
        group: Any = model.process_group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self._distributed = distributed
        self._limit = _time_limit(group)
        self._has_failed = False
        """Whether record() has failed on a rank and all of them know it."""
        if group not in _GROUPS:
            members = distributed.get_process_group_ranks(group)
            with self._meeting():
                _GROUPS[group] = distributed.new_group(
                    members, timeout=self._limit, backend="gloo", use_local_synchronization=True
                )
        self._group = _GROUPS[group]

    @property
    def settings(self) -> dict[str, str]:
        """What the manifest of this rank's shard says."""
        return {RANK: str(self.rank), RANKS: str(self.size)}

    def path_of_shard(self, path: str | os.PathLike[str]) -> str:
        """Return where this rank records. path: the folder of the run."""
        return os.path.join(os.fspath(path), shard_name(self.rank))

    def refuse_unsupported(self) -> None:
        """Refuse what changes gradients on their way from rank to rank. The same on every rank, so that none waits for another."""
        model: Any = self._model
        for hook, _ in getattr(model, "_comm_hooks", []):
            name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
            if name not in EXACT_HOOKS:
                raise RecordingError(
                    f"the communication hook {name} of DistributedDataParallel may change gradients on their way (compression), so slots would "
                    f"not explain them. Train without it: gradients are then averaged as they are."
                )
        if getattr(model, "mixed_precision", None) is not None:
            raise RecordingError(
                "mixed_precision= of DistributedDataParallel is not recorded: weights are copied to another type for each pass. Train "
                "with torch.autocast instead."
            )
        if getattr(getattr(model, "_join_config", None), "enable", False):
            raise RecordingError(f"{JOINED}.")

    def sum(self, numbers: Projected) -> Projected:
        """Return the sums over all ranks, which are the same on all of them to the last bit."""
        tensor = torch.from_numpy(numbers.copy())
        with self._answering("before this update"):
            self._distributed.all_reduce(tensor, group=self._group)
        summed: Projected = tensor.numpy()
        return summed

    # While a recording begins

    def gather(self, value: Any = None) -> list[Any]:
        """Return what all ranks have given, by rank. If record() has failed on one of them, that is an error on all."""
        return self._gathered(value, None)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the other ranks of an error, in the place of what they gather next: they would wait for this rank forever."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                self._gathered(None, error)
            raise

    def _gathered(self, value: Any, error: Exception | None) -> list[Any]:
        said = None if error is None else f"{type(error).__name__}: {error}"
        given: list[Any] = [None] * self.size
        with self._meeting():
            self._distributed.all_gather_object(given, (value, said), group=self._group)
        for rank, (_, message) in enumerate(given):
            if message is None:
                continue
            self._has_failed = True
            if error is None:
                raise RecordingError(f"rank {rank} cannot record, so no rank does: {message}")
        return [value for value, _ in given]

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Wait for the other ranks in record(); say so if it takes long."""
        timer = threading.Timer(WAITS_IN_SILENCE, self._say_who_waits)
        timer.daemon = True
        timer.start()
        try:
            with self._answering("in record()"):
                yield
        finally:
            timer.cancel()

    def _say_who_waits(self) -> None:
        warnings.warn(
            f"rank {self.rank} has waited {WAITS_IN_SILENCE:.0f} seconds for the other ranks in dualform.record(), which must be called on "
            f"every rank. It waits {self._limit.total_seconds():.0f} seconds, the timeout= of init_process_group().",
            stacklevel=2,
        )

    @contextlib.contextmanager
    def _answering(self, where: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # PyTorch says which address did not answer
            self._has_failed = True
            raise RecordingError(
                f"rank {self.rank} got no answer from all {self.size} ranks {where}. Another rank has ended, and its own error says why; or it "
                f"did not do the same as this one within {self._limit.total_seconds():.0f} seconds (timeout= of init_process_group()): call "
                f"dualform.record() on every rank, or on none, and make as many updates on each. PyTorch says: {error}"
            ) from error


def _time_limit(group: Any) -> timedelta:
    """Return how long the ranks of a group wait for each other, timeout= of init_process_group. PyTorch does not tell it in public."""
    from torch.distributed.distributed_c10d import default_pg_timeout

    try:
        device = group._device_types[0]
        limit = group._get_backend(device).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return default_pg_timeout
    return limit if isinstance(limit, timedelta) else default_pg_timeout


def ranks_of(model: object) -> Ranks | None:
    """Return the ranks that train a model, or None if one process does."""
    parallel: Any = getattr(model, "_orig_mod", model)  # what torch.compile() wraps
    if not is_parallel(parallel):
        return None
    group = parallel.process_group
    from torch import distributed

    return Ranks(parallel) if distributed.get_world_size(group) > 1 else None


def is_parallel(model: object) -> bool:
    """Whether a model is a DistributedDataParallel. Without importing it, for it takes a while."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__]
    return "torch.nn.parallel.distributed.DistributedDataParallel" in names


def inner_network(model: object) -> object:
    """Return the plain model within torch.compile() and DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", model)
        if is_parallel(inner):
            inner = inner.module  # type: ignore[attr-defined]
        if inner is model:
            return model
        model = inner
