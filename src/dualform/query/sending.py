"""What is sent to another process: the store as its address, pieces as their places, and only the numbers that a task needs.

An open store is never pickled. The process that gets a task opens it once and keeps it for the tasks that follow.
"""

from __future__ import annotations

import io
import pickle
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from dualform.arrays import Array, Ints
from dualform.errors import QuestionError, StoreChangedError
from dualform.query.groups import Groups
from dualform.store.files import Files
from dualform.store.format import SLOTS, checksum
from dualform.store.reader import Store
from dualform.store.run import open_store
from dualform.store.slots import SlotChunk

OPEN_STORES = 2
"""A worker keeps this many stores open."""
KEPT_SCORERS = 2
"""A worker keeps this many scorers, which may hold what they have computed for earlier tasks."""
SHARED_BYTES = 64 << 10
"""Tensors from this size on are sent once for all tasks of a scan, where the executor can do that."""


class Sendable(Protocol):
    """A task that can be sent."""

    @property
    def scorer(self) -> Any:
        """What scores them; the same for all tasks of a scan, unless `part` cuts it down."""

    @property
    def runs(self) -> Sequence[Any]:
        """The runs of slots that it scores."""

    @property
    def store(self) -> Store:
        """The store that they are in."""

    @property
    def nbytes(self) -> int:
        """How much it decodes, about."""

    def part(self) -> Any:
        """Return the same task without what it does not need."""

    def run(self) -> Any:
        """Return its result."""


def uncached(instance: Any, sent: Sequence[str] = ()) -> dict[str, Any]:
    """Return the attributes of an object without its cached properties, but for those whose names are in `sent`."""
    kind = type(instance)
    return {
        name: value
        for name, value in vars(instance).items()
        if name in sent or not isinstance(getattr(kind, name, None), cached_property)
    }


@dataclass(frozen=True)
class StoreState:
    """Tells whether a store, opened elsewhere, has what was asked about."""

    run: str
    chunks: int
    checksum: str
    """Of the checksums of these chunks."""

    @staticmethod
    def of(store: Store, chunks: int | None = None) -> StoreState:
        """Return the state of a store up to a number of chunks; default: all."""
        return store.cached(("state", chunks), lambda: _state_of(store, chunks))


def _state_of(store: Store, chunks: int | None) -> StoreState:
    manifest = store.manifest
    known = manifest.chunks[:chunks]
    text = " ".join(chunk.files[SLOTS].checksum for chunk in known)
    return StoreState(manifest.run, len(known), checksum(text.encode()))


class SentGroups:
    """The groups of a task's slots, as far as a reducer needs them."""

    def __init__(self, place: int, count: int, codes: dict[int, Array]):
        """place: among the groups that the asking process knows. codes: by the number of a run's first slot."""
        self.place = place
        self._count = count
        self._codes = codes

    def __len__(self) -> int:
        return self._count

    def __call__(self, run: Any) -> Ints:
        """Return the number of each slot's group, (slots,)."""
        return self._codes[run.first_slot].astype(np.int64)


@dataclass(frozen=True)
class Packed:
    """A task that is ready to be sent."""

    content: bytes
    shared: tuple[Any, ...]
    """Tensors that other tasks need, too: as arrays, or what `share` returned for them."""


class Packer:
    """Packs the tasks of one scan, and unpacks their results."""

    def __init__(self, share: Callable[[Array], Any] | None = None):
        """share: publishes an array for all tasks, and returns what stands for it. Default: each task has its own copy."""
        self._share = share
        self._groups: list[Groups] = []
        self._shared: dict[int, tuple[Any, Any]] = {}
        """By the identity of an object, which is kept so that no other gets the same: what stands for it."""
        self.name = secrets.token_hex(8)
        """Of the scan, for workers that keep its scorer."""
        self._store: Store | None = None

    def pack(self, task: Sendable) -> Packed:
        """Return a task as bytes."""
        self._store = task.store
        content = io.BytesIO()
        pickler = _TaskPickler(content, self, task)
        try:
            pickler.dump(pickler.part)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise QuestionError(
                f"this question cannot be sent to another process: {error}. Scorers and reducers of your own must be defined at the "
                f'top level of a module. executor="threads" sends nothing.'
            ) from error
        return Packed(content.getvalue(), tuple(pickler.shared))

    def unpack(self, content: bytes) -> Any:
        """Return the result of a task."""
        return _ResultUnpickler(io.BytesIO(content), self).load()

    def place_of(self, groups: Groups) -> int:
        """Return the place of some groups among all that were sent."""
        for place, known in enumerate(self._groups):
            if known is groups:
                return place
        self._groups.append(groups)
        return len(self._groups) - 1

    def groups_at(self, place: int) -> Groups:
        """Return groups that were sent."""
        return self._groups[place]

    @property
    def store(self) -> Store:
        """The store that tasks were about."""
        assert self._store is not None
        return self._store

    def shared_tensor(self, tensor: Tensor) -> Any | None:
        """Return what stands for a tensor that is sent once for all tasks; None: it is sent with each."""
        if self._share is None or tensor.nbytes < SHARED_BYTES:
            return None
        return self._published(tensor, lambda: _array(tensor))

    def shared_scorer(self, scorer: Any) -> Any:
        """Return what stands for a scorer, as bytes."""

        def packed() -> Array:
            content = io.BytesIO()
            _Pickler(content).dump(scorer)
            return np.frombuffer(content.getvalue(), np.uint8)

        return self._published(scorer, packed)

    def _published(self, instance: Any, array_of: Callable[[], Array]) -> Any:
        if id(instance) not in self._shared:
            array = array_of()
            handle = array if self._share is None else self._share(array)
            self._shared[id(instance)] = (instance, handle)
        return self._shared[id(instance)][1]


class _Pickler(pickle.Pickler):
    """Writes stores by their address, and tensors as arrays: PyTorch would write all of the memory that a tensor is a view of."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)

    def persistent_id(self, instance: Any) -> tuple[Any, ...] | None:
        if isinstance(instance, Store):
            return "store", instance.files, StoreState.of(instance)
        return None

    def reducer_override(self, instance: Any) -> Any:
        if isinstance(instance, Tensor):
            return torch.from_numpy, (_array(instance),)
        return NotImplemented


class _TaskPickler(_Pickler):
    def __init__(self, file: io.BytesIO, packer: Packer, task: Sendable):
        super().__init__(file)
        self._packer = packer
        self._runs = task.runs
        self._whole_scorer = task.scorer
        self.part = task.part()
        self.shared: list[Any] = []

    def persistent_id(self, instance: Any) -> tuple[Any, ...] | None:
        if instance is self._whole_scorer:
            return "scorer", self._packer.name, self._place(self._packer.shared_scorer(instance))
        if isinstance(instance, SlotChunk):
            return "chunk", instance.store, instance.layer.name, instance.chunk_number, instance.end_step
        if isinstance(instance, Groups):
            codes = {run.first_slot: _narrow(instance(run), len(instance)) for run in self._runs}
            return "groups", self._packer.place_of(instance), len(instance), codes
        if isinstance(instance, Tensor):
            handle = self._packer.shared_tensor(instance)
            return None if handle is None else ("tensor", self._place(handle))
        return super().persistent_id(instance)

    def _place(self, handle: Any) -> int:
        self.shared.append(handle)
        return len(self.shared) - 1


class _TaskUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[Array]):
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        what, *rest = pid
        if what == "store":
            return opened(*rest)
        if what == "chunk":
            store, name, place, end_step = rest
            return store.chunk_of(name, place, end_step)
        if what == "groups":
            return SentGroups(*rest)
        if what == "scorer":
            scan, place = rest
            return _kept_scorer(scan, self._shared[place])
        [place] = rest
        # Shared memory may not be written to, which PyTorch cannot express
        return torch.from_numpy(self._shared[place].copy())


class _ResultPickler(_Pickler):
    def persistent_id(self, instance: Any) -> tuple[Any, ...] | None:
        if isinstance(instance, SentGroups):
            return "groups", instance.place
        return ("store",) if isinstance(instance, Store) else None


class _ResultUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, packer: Packer):
        super().__init__(file)
        self._packer = packer

    def persistent_load(self, pid: Any) -> Any:
        what, *rest = pid
        return self._packer.store if what == "store" else self._packer.groups_at(*rest)


def run_packed(content: bytes, *shared: Array) -> bytes:
    """Run a task in the process that it was sent to, and return its result as bytes."""
    task: Sendable = _TaskUnpickler(io.BytesIO(content), shared).load()
    result = task.run()
    packed = io.BytesIO()
    _ResultPickler(packed).dump(result)
    task.store.decoded(task.nbytes)
    return packed.getvalue()


def _kept_scorer(scan: str, content: Array) -> Any:
    """Return the scorer of a scan, the same for all of its tasks."""
    with _LOCK:
        scorer = _SCORERS.get(scan)
    if scorer is None:
        scorer = _TaskUnpickler(io.BytesIO(content.tobytes()), ()).load()
        with _LOCK:
            _SCORERS[scan] = scorer
    return scorer


_SCORERS: LRUCache[str, Any] = LRUCache(KEPT_SCORERS)
_STORES: LRUCache[Hashable, Store] = LRUCache(OPEN_STORES)
_LOCK = Lock()


def opened(files: Files, state: StoreState) -> Store:
    """Return the store that a task is about, opened at the first task and kept for the ones that follow."""
    key = (type(files), files.location)
    with _LOCK:
        store = _STORES.get(key)
        if store is None or StoreState.of(store, state.chunks) != state:
            store = open_store(files)  # it may have grown since
        if StoreState.of(store, state.chunks) != state:
            raise StoreChangedError(
                f"the recording in {store.location} is not the one that was asked about: it was resumed from an earlier step, or replaced, "
                f"since it was opened. Open it again."
            )
        _STORES[key] = store
        return store


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().contiguous().numpy()
    return array


def _narrow(codes: Ints, count: int) -> Array:
    """Return group numbers in as few bytes as they need."""
    return codes.astype(np.min_scalar_type(max(count - 1, 0)))
