"""The writer: collects steps into chunks and seals them, in a thread of its own, with bounded memory.

Order of a seal: files, their folder, its rename, the store's folder, then the manifest that names it. Whatever happens
in between, the manifest on disk names only what is whole.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

import polars as pl
from torch import Tensor

from dualform.errors import WriterError
from dualform.layers.layer import Layer
from dualform.store import tables
from dualform.store.chunks import EqualKeys, slot_tensors
from dualform.store.files import WritableFiles, cure_of, writing
from dualform.store.format import (
    CHUNK_FILES,
    MANIFEST,
    ROWS,
    SLOTS,
    STEPS,
    SUMS,
    UPDATES,
    Chunk,
    Column,
    Grouping,
    Manifest,
    Parameter,
    Snapshot,
    Totals,
    chunk_name,
    groups_name,
    snapshot_name,
    totals_name,
)
from dualform.store.labels import Labels, chunk_about, totals_about
from dualform.store.lock import FolderLock
from dualform.store.memory import Pool
from dualform.store.reader import Store
from dualform.store.records import Step
from dualform.store.tables import write_table
from dualform.store.tensors import write_tensors


@dataclass(frozen=True)
class NewTotals:
    """All totals after `step` updates: tensors, and for each grouping the table of its groups."""

    step: int
    rows: int
    groupings: Sequence[Grouping]
    tensors: dict[str, Tensor]
    groups: Sequence[pl.DataFrame]

    @property
    def nbytes(self) -> int:
        """How much memory they take, roughly."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class NewLayer:
    """A module's layers that entered during training."""

    module: str
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class _Moment:
    """All weights and optimizer state after `step` updates, all totals of that moment, or both."""

    step: int
    weights: dict[str, Tensor] | None = None
    totals: NewTotals | None = None

    @property
    def nbytes(self) -> int:
        weights = 0 if self.weights is None else sum(tensor.nbytes for tensor in self.weights.values())
        return weights + (0 if self.totals is None else self.totals.nbytes)


@dataclass(frozen=True)
class _End:
    """The recording is over. ended: how; None: nothing more is to be written."""

    ended: str | None
    left_out: Mapping[str, str]


class _Request(Enum):
    SEAL = "seal what there is"


_Reply = queue.SimpleQueue[None]
"""Gets an entry when everything that was handed over before it is on the disk."""
_Item = list[Step] | _Moment | NewLayer | _End | _Reply | _Request
STOP = _End(None, MappingProxyType({}))


class Writer:
    """Writes one store, in the background. weights: all weights and optimizer state when recording begins.

    Whoever records calls it from one thread, and an exception may come there at any moment (Ctrl-C). So nothing here is counted
    twice if it is called again after an exception, no lock is held that could stay locked, and the background thread, which no
    Ctrl-C reaches, unlocks the folder when it ends.
    """

    def __init__(
        self,
        files: WritableFiles,
        manifest: Manifest,
        pool: Pool,
        weights: dict[str, Tensor],
        *,
        queue_bytes: int = 256 << 20,
        chunk_bytes: int = 64 << 20,
        seal_seconds: float = 30.0,
    ):
        self.location = files.location
        manifest = manifest.with_session()
        self._queue_bytes = queue_bytes
        self._waiting: list[Step] = []
        """Steps that are yet to be handed to the background thread."""
        self._waiting_bytes = 0
        self._turn_bytes = min(chunk_bytes, queue_bytes) // 4
        self._next_step = manifest.end_step
        self._handed_over = 0
        """How many bytes the background thread was given."""
        inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        thread: threading.Thread | None = None
        lock = FolderLock(files)
        try:
            self._background = _Background(files, manifest, pool, lock, inbox, chunk_bytes, seal_seconds)
            # There is never a manifest without the weights it began with
            with writing(files.location):
                self._background.add_snapshot(manifest.end_step, weights)
            thread = threading.Thread(target=self._background.run, name="dualform-writer", daemon=True)
            self._inbox = inbox
            self._thread = thread
            # A writer that is dropped without being closed (an exception while a recorder is made) ends its thread
            self._finalizer = weakref.finalize(self, inbox.put, STOP)
            self._finalizer.atexit = False
            thread.start()
        except BaseException:
            inbox.put(STOP)
            if thread is not None and thread.ident is not None:
                self._join()
            lock.release()
            raise

    @property
    def manifest(self) -> Manifest:
        """What is sealed."""
        return self._background.manifest

    @property
    def failed(self) -> bool:
        """Whether something went wrong in the background."""
        return self._background.failure is not None

    @property
    def held_bytes(self) -> int:
        """How many bytes are on their way to the disk."""
        return self._handed_over - self._background.written

    def put(self, step: Step, columns: Sequence[Column]) -> None:
        """Hand over a step; waits while more than queue_bytes, and a few steps, are on their way to the disk.

        A step that was put before is left out, so that whoever was interrupted can put it again.
        """
        self._background.columns = tuple(columns)
        if step.number >= self._next_step:
            self._waiting_bytes += step.nbytes
            self._waiting.append(step)
            self._next_step = step.number + 1
        if self._waiting_bytes >= self._turn_bytes:
            self._wait_for_room(self._waiting_bytes)
            self._pass_on()

    def _pass_on(self) -> None:
        """Wake the background thread: not for every step, for each turn of it holds up the training."""
        if self._waiting:
            # In this order: an exception in between makes the thread get steps twice, which it notices, but never loses one
            self._inbox.put(list(self._waiting))
            self._handed_over += sum(step.nbytes for step in self._waiting)
            self._waiting.clear()
        self._waiting_bytes = 0

    def snapshot(self, step: int, weights: dict[str, Tensor]) -> None:
        """Hand over all weights and optimizer state after `step` updates; the tensors must be copies."""
        self._put_moment(_Moment(step, weights))

    def totals(self, totals: NewTotals, weights: dict[str, Tensor] | None) -> None:
        """Hand over all totals, which replace those before, with a snapshot of the same moment, if there is one."""
        self._put_moment(_Moment(totals.step, weights, totals))

    def _put_moment(self, moment: _Moment) -> None:
        self._pass_on()
        self._wait_for_room(moment.nbytes)
        self._inbox.put(moment)
        self._handed_over += moment.nbytes

    def wait(self) -> None:
        """Seal what there is, and wait until all that was handed over is on the disk."""
        done: _Reply = queue.SimpleQueue()
        self._pass_on()
        self._inbox.put(done)
        while not self._background.has_ended:
            with contextlib.suppress(queue.Empty):
                done.get(timeout=0.2)
                break
        self.check()

    def seal(self) -> None:
        """Have everything sealed that was handed over, without waiting for it."""
        self._pass_on()
        self._inbox.put(_Request.SEAL)

    def add_layers(self, module: str, layers: Sequence[Layer], parameters: Sequence[Parameter]) -> None:
        """From the next step on there are more layers."""
        self._pass_on()
        self._inbox.put(NewLayer(module, tuple(layers), tuple(parameters)))

    def close(self, ended: str, left_out: Mapping[str, str] = MappingProxyType({})) -> None:
        """Seal what is there, write down how it ended and which other layers have no slots, and stop."""
        self._pass_on()
        self._inbox.put(_End(ended, dict(left_out)))
        self._join()
        self.check()

    def abandon(self) -> None:
        """Stop as soon as what is being written is on the disk, and leave the rest."""
        self._background.is_abandoned = True
        self._inbox.put(STOP)
        self._join()

    def _join(self) -> None:
        """Wait for the background thread, which unlocks the folder at its end."""
        # Not by Thread.join(): up to Python 3.12, an exception within it makes the thread seem to have ended
        while not self._background.has_ended:
            with contextlib.suppress(queue.Empty):
                self._background.progress.get(timeout=1.0)
        self._thread.join()
        self._finalizer.detach()

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        failure = self._background.failure
        if failure is not None:
            raise WriterError(
                f"writing {self.location} failed: {failure}.{cure_of(failure)} The store holds what was sealed before, up to step "
                f"{self.manifest.end_step}; it opens with dualform.open()."
            ) from failure

    def _wait_for_room(self, nbytes: int) -> None:
        while not self._background.has_ended and self.held_bytes > 0 and self.held_bytes + nbytes > self._queue_bytes:
            self._inbox.put(_Request.SEAL)  # there may be less than a chunk
            with contextlib.suppress(queue.Empty):
                self._background.progress.get(timeout=1.0)
        self.check()


class _Background:
    """The part of a writer that runs in its own thread."""

    def __init__(
        self,
        files: WritableFiles,
        manifest: Manifest,
        pool: Pool,
        lock: FolderLock,
        inbox: queue.SimpleQueue[_Item],
        chunk_bytes: int,
        seal_seconds: float,
    ):
        self.manifest = manifest
        self.columns = manifest.columns
        """Of the rows; set by whoever hands over steps."""
        self.failure: BaseException | None = None
        self.is_abandoned = False
        self.has_ended = False
        self.written = 0
        """How many of the bytes that were handed over are on the disk, or no longer needed."""
        self.progress: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Gets an entry whenever that number grows."""
        self._files = files
        self._pool = pool
        self._lock = lock
        self._inbox = inbox
        self._chunk_bytes = chunk_bytes
        self._seal_seconds = seal_seconds
        self._labels = Labels(manifest)
        self._equal = _equal_keys(files, manifest)
        self._slots = [sum(chunk.slots[n] for chunk in manifest.chunks) for n in range(len(manifest.layers))]
        """By layer number: how many slots are sealed."""
        self._steps: list[Step] = []
        self._steps_bytes = 0
        self._next_step = manifest.end_step
        self._next_row = sum(chunk.rows for chunk in manifest.chunks)
        self._sealed_at = time.monotonic()

    def run(self) -> None:
        """Write what comes in, until the end or a failure; then unlock the folder."""
        try:
            self._write_until_the_end()
        except BaseException as failure:
            with contextlib.suppress(OSError):
                self._files.remove(_unfinished(chunk_name(len(self.manifest.chunks))))
            self.failure = failure
        try:
            self._lock.release()
        except OSError as failure:
            self.failure = self.failure or failure
        finally:
            self.has_ended = True  # whoever closes the writer waits for this
            self.progress.put(None)

    def _write_until_the_end(self) -> None:
        while True:
            item = self._inbox.get()
            if isinstance(item, _End):
                if item.ended is not None and not self.is_abandoned:
                    self._seal(item.ended, item.left_out)
                return
            if not self.is_abandoned:
                self._do(item)

    def _do(self, item: _Item) -> None:
        if isinstance(item, list):
            self._add_steps(item)
        elif isinstance(item, _Moment):
            self._seal()
            self._add_moment(item)
        elif isinstance(item, NewLayer):
            self._seal()
            self._add_layers(item)
        else:
            self._seal()
            if isinstance(item, queue.SimpleQueue):
                item.put(None)

    def _add_steps(self, steps: list[Step]) -> None:
        for step in steps:
            if step.number < self._next_step:  # handed over twice: an exception came in between
                self._release(step.nbytes)
                continue
            if step.number > self._next_step:
                raise RuntimeError(f"step {step.number} came where step {self._next_step} was expected")
            self._next_step = step.number + 1
            self._steps.append(step)
            self._steps_bytes += step.nbytes
        is_late = time.monotonic() - self._sealed_at > self._seal_seconds
        if self._steps and (self._steps_bytes >= self._chunk_bytes or is_late):
            self._seal()

    def _add_moment(self, moment: _Moment) -> None:
        if moment.step == self._next_step:  # never beyond the last step
            manifest = self.manifest
            if moment.weights is not None:
                manifest = self._with_snapshot(moment.step, moment.weights)
            if moment.totals is None:
                self._publish(manifest)
            else:
                manifest = replace(manifest, columns=self.columns)
                self.manifest = write_totals(self._files, manifest, moment.totals)
        self._release(moment.nbytes)
        self._remove_old_snapshots()

    def _add_layers(self, new: NewLayer) -> None:
        self._equal += [EqualKeys() for _ in new.layers]
        self._slots += [0 for _ in new.layers]
        self.manifest = replace(
            self.manifest,
            layers=(*self.manifest.layers, *new.layers),
            parameters=(*self.manifest.parameters, *new.parameters),
            left_out={name: why for name, why in self.manifest.left_out.items() if name != new.module},
        )
        self._labels = Labels(self.manifest)

    def _release(self, nbytes: int) -> None:
        self.written += nbytes
        self.progress.put(None)

    def add_snapshot(self, step: int, weights: dict[str, Tensor]) -> None:
        """Write a snapshot, and the manifest that names it."""
        self._publish(self._with_snapshot(step, weights))

    def _seal(self, ended: str | None = None, also_left_out: Mapping[str, str] = MappingProxyType({})) -> None:
        if not self._steps and ended is None:
            return
        manifest = self._with_findings(ended, also_left_out)
        if self._steps and manifest.keep != "totals":
            chunk = self._write_chunk(len(manifest.chunks), self.columns)
            manifest = replace(manifest, chunks=(*manifest.chunks, chunk))
        self._publish(manifest)
        for step in self._steps:
            for block in step.blocks:
                block.give_back(self._pool)
        self._release(self._steps_bytes)
        self._steps = []
        self._steps_bytes = 0
        self._sealed_at = time.monotonic()

    def _with_findings(self, ended: str | None, also_left_out: Mapping[str, str]) -> Manifest:
        """Return the manifest with what the collected steps say about layers."""
        inexact = dict(self.manifest.inexact)
        rows = dict(self.manifest.rows)
        for step in self._steps:
            inexact = {**step.marks, **inexact}  # the first mark of a layer counts, and the last evidence
            rows |= step.row_evidence
        left_out = {**self.manifest.left_out, **also_left_out}
        return replace(self.manifest, columns=self.columns, ended=ended, inexact=inexact, rows=rows, left_out=left_out)

    def _write_chunk(self, number: int, columns: Sequence[Column]) -> Chunk:
        name = chunk_name(number)
        unfinished = _unfinished(name)
        self._files.remove(unfinished)
        steps = self._steps
        first_keys = [equal.stored for equal in self._equal]
        tensors, slots = slot_tensors(steps, self._equal)
        keys = tuple(equal.stored - before for equal, before in zip(self._equal, first_keys, strict=True))
        parts = {
            ROWS: tables.rows_table(steps, columns),
            UPDATES: tables.updates_table(steps),
            STEPS: tables.steps_table(steps),
        }
        rows = parts[ROWS].height
        chunk = Chunk(steps[0].number, steps[-1].number + 1, self._next_row, rows, slots, keys, files={})
        place = chunk_about(chunk, self._slots, first_keys)
        labels = {file: self._labels.write(f"{name}/{file}", place) for file in CHUNK_FILES}
        files = {SLOTS: write_tensors(self._files, f"{unfinished}/{SLOTS}", tensors, labels[SLOTS])}
        for file, table in parts.items():
            files[file] = write_table(self._files, f"{unfinished}/{file}", table, labels[file])
        self._files.publish(unfinished, name)
        self._next_row += rows
        self._slots = [before + new for before, new in zip(self._slots, slots, strict=True)]
        return replace(chunk, files=files)

    def _with_snapshot(self, step: int, weights: dict[str, Tensor]) -> Manifest:
        """Write a snapshot; returns the manifest that names it."""
        if any(snapshot.step == step for snapshot in self.manifest.snapshots):
            return self.manifest  # the same weights; a named file is never written again
        name = snapshot_name(step)
        tensors = {key: [tensor.numpy()] for key, tensor in weights.items()}
        file = write_tensors(self._files, _unfinished(name), tensors, self._labels.write(name, {}))
        self._files.publish(_unfinished(name), name)
        kept = self.manifest.snapshots
        if self.manifest.keep == "totals":  # disk does not grow with the number of steps
            kept = tuple(snapshot for snapshot in kept if snapshot.step == 0)
        return replace(self.manifest, snapshots=(*kept, Snapshot(step, file)))

    def _remove_old_snapshots(self) -> None:
        named = {snapshot_name(snapshot.step) for snapshot in self.manifest.snapshots}
        for name in self._files.list():
            if name.startswith("snapshot-") and name not in named:
                self._files.remove(name)

    def _publish(self, manifest: Manifest) -> None:
        publish_manifest(self._files, manifest)
        self.manifest = manifest


def _unfinished(name: str) -> str:
    """Return the name under which a file or folder is written until it is complete."""
    return f".{name}"


def publish_manifest(files: WritableFiles, manifest: Manifest) -> None:
    """Replace the manifest. Everything that it names must be published before."""
    files.write(_unfinished(MANIFEST), manifest.dump())
    files.publish(_unfinished(MANIFEST), MANIFEST)


def write_totals(
    files: WritableFiles,
    manifest: Manifest,
    new: NewTotals,
    publish: Callable[[WritableFiles, Manifest], None] = publish_manifest,
) -> Manifest:
    """Write totals into a folder of their own, and publish and return the manifest that names it. Those before are removed."""
    number = manifest.totals.number + 1 if manifest.totals else 0
    folder = totals_name(number)
    unfinished = _unfinished(folder)
    files.remove(unfinished)
    totals = Totals(number, new.step, new.rows, tuple(new.groupings), files={})
    labels = Labels(manifest)
    about = totals_about(totals)
    tensors = {name: [tensor.numpy()] for name, tensor in new.tensors.items()}
    label = labels.write(f"{folder}/{SUMS}", about)
    written = {SUMS: write_tensors(files, f"{unfinished}/{SUMS}", tensors, label)}
    for grouping, table in enumerate(new.groups):
        name = groups_name(grouping)
        label = labels.write(f"{folder}/{name}", about)
        written[name] = write_table(files, f"{unfinished}/{name}", table, label)
    files.publish(unfinished, folder)
    manifest = replace(manifest, totals=replace(totals, files=written))
    publish(files, manifest)
    for name in files.list():
        if name.startswith("totals-") and name != folder:
            with contextlib.suppress(OSError):  # a reader may be using them
                files.remove(name)
    return manifest


def _equal_keys(files: WritableFiles, manifest: Manifest) -> list[EqualKeys]:
    """The keys that a resumed recording holds already, found again by content."""
    equal = [EqualKeys(sum(chunk.keys[n] for chunk in manifest.chunks)) for n in range(len(manifest.layers))]
    if manifest.chunks:
        store = Store(files, manifest)
        for number, layer in enumerate(manifest.layers):
            if any(chunk.key_numbers is not None for chunk in store.chunks(layer.name)):
                for first, keys in store.stored(layer.name, "key"):
                    equal[number].learn(keys, first)
    return equal
