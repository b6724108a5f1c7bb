"""The writer: collects steps into chunks and seals them, in a thread of its own, with bounded memory.

Order of a seal: files, their folder, its rename, the store's folder, then the manifest that names it. Whatever happens
in between, the manifest on disk names only what is whole.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from dualform.errors import WriterError
from dualform.layers.streams import Layer
from dualform.store import tables
from dualform.store.access import cure_of, writing
from dualform.store.chunks import slot_tensors
from dualform.store.encoding import Pool
from dualform.store.equal import EqualKeys
from dualform.store.folder import flush_folder, lock, publish, write_table
from dualform.store.format import (
    CHUNK_FILES,
    ROWS,
    SLOTS,
    STEPS,
    UPDATES,
    Chunk,
    Column,
    Manifest,
    Parameter,
    Snapshot,
    chunk_name,
    snapshot_name,
)
from dualform.store.labels import Labels, chunk_about
from dualform.store.reader import Store
from dualform.store.records import Step
from dualform.store.safe import write_tensors
from dualform.store.sums import NewTotals, write_totals


@dataclass(frozen=True)
class NewLayer:
    """A module's layers that entered during training."""

    module: str
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]


class Writer:
    """Writes one store, in the background. weights: all weights and optimizer state when recording begins."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        pool: Pool,
        weights: dict[str, Tensor],
        *,
        queue_bytes: int = 256 << 20,
        chunk_bytes: int = 64 << 20,
        seal_seconds: float = 30.0,
    ):
        self.folder = folder
        manifest = manifest.with_session()
        self.manifest = manifest  # changed by the background thread alone
        self._columns = manifest.columns
        self._left_out: dict[str, str] = {}
        self._queue_bytes, self._chunk_bytes, self._seal_seconds = queue_bytes, chunk_bytes, seal_seconds
        self._lock_file = lock(folder)
        self._pool = pool
        self._labels = Labels(manifest)
        self._equal = _equal_keys(folder, manifest)
        self._slots = [sum(chunk.slots[n] for chunk in manifest.chunks) for n in range(len(manifest.layers))]
        """By layer number: how many slots are sealed."""
        self._inbox: queue.SimpleQueue[
            list[Step] | tuple[int | NewTotals, dict[str, Tensor]] | NewLayer | threading.Event | str | None
        ] = queue.SimpleQueue()
        self._held = 0
        self._room = threading.Condition()
        self._failure: BaseException | None = None
        self.failed = False
        """Whether something went wrong in the background."""
        self._waiting: list[Step] = []
        self._waiting_bytes, self._turn_bytes = 0, min(chunk_bytes, queue_bytes) // 4
        self._steps: list[Step] = []
        self._steps_bytes = 0
        self._next_row = manifest.chunks[-1].first_row + manifest.chunks[-1].rows if manifest.chunks else 0
        self._sealed_at = time.monotonic()
        # There is never a manifest without the weights it began with
        try:
            with writing(folder):
                self._publish(self._with_snapshot(manifest.end_step, weights))
        except BaseException:
            self.abandon()
            raise
        self._thread = threading.Thread(target=self._work, name="dualform-writer", daemon=True)
        self._thread.start()

    def put(self, step: Step, columns: Sequence[Column]) -> None:
        """Hand over a step; waits while more than queue_bytes, and a few steps, are on their way to the disk."""
        self._columns = tuple(columns)
        self._waiting.append(step)
        self._waiting_bytes += step.nbytes
        if self._waiting_bytes >= self._turn_bytes:
            self._pass_on()

    def _pass_on(self) -> None:
        """Wake the background thread: not for every step, for each turn of it holds up the training."""
        if self._waiting:
            steps, nbytes = self._waiting, self._waiting_bytes
            self._waiting, self._waiting_bytes = [], 0
            self._hold(nbytes)
            self._inbox.put(steps)

    def snapshot(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Hand over all weights and optimizer state after `step` updates; the tensors must be copies."""
        self._pass_on()
        self._hold(sum(t.nbytes for t in tensors.values()))
        self._inbox.put((step, tensors))

    def totals(self, totals: NewTotals, weights: dict[str, Tensor]) -> None:
        """Hand over all totals, which replace those before, with a snapshot of the same moment."""
        self._pass_on()
        self._hold(totals.nbytes)
        self._inbox.put((totals, weights))

    def wait(self) -> None:
        """Seal what there is, and wait until all that was handed over is on the disk."""
        done = threading.Event()
        self._pass_on()
        self._inbox.put(done)
        while not done.wait(0.2):
            self.check()
        self.check()

    def add_layers(self, module: str, layers: Sequence[Layer], parameters: Sequence[Parameter]) -> None:
        """From the next step on there are more layers."""
        self._pass_on()
        self._inbox.put(NewLayer(module, tuple(layers), tuple(parameters)))

    def abandon(self) -> None:
        """Let go of the folder after a failure."""
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def close(self, ended: str, left_out: Mapping[str, str] = MappingProxyType({})) -> None:
        """Seal what is there, write down how it ended and which other layers have no slots, and stop."""
        self._left_out = dict(left_out)
        if not self._thread.is_alive() and self._lock_file is None:
            return
        self._pass_on()
        self._inbox.put(ended)
        self._thread.join()
        self.abandon()
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        if self._failure is not None:
            raise WriterError(
                f"writing {self.folder} failed: {self._failure}.{cure_of(self._failure)} The store holds what was sealed before, up to step "
                f"{self.manifest.end_step}; it opens with dualform.open()."
            ) from self._failure

    def _hold(self, nbytes: int) -> None:
        with self._room:
            while self._failure is None and self._held and self._held + nbytes > self._queue_bytes:
                self._inbox.put(None)  # seal what there is: there may be less than a chunk
                self._room.wait()
            self._held += nbytes
        self.check()

    def _release(self, nbytes: int) -> None:
        with self._room:
            self._held -= nbytes
            self._room.notify_all()

    def _work(self) -> None:
        try:
            while True:
                item = self._inbox.get()
                if isinstance(item, str):
                    self._seal(ended=item)
                    return
                if isinstance(item, list):
                    self._steps.extend(item)
                    self._steps_bytes += sum(step.nbytes for step in item)
                    late = time.monotonic() - self._sealed_at > self._seal_seconds
                    if self._steps_bytes >= self._chunk_bytes or late:
                        self._seal()
                elif item is None:
                    self._seal()
                elif isinstance(item, threading.Event):
                    self._seal()
                    item.set()
                elif isinstance(item, NewLayer):
                    self._seal()
                    layers, parameters = self.manifest.layers, self.manifest.parameters
                    left_out = {name: why for name, why in self.manifest.left_out.items() if name != item.module}
                    self._equal += [EqualKeys() for _ in item.layers]
                    self._slots += [0 for _ in item.layers]
                    self.manifest = replace(
                        self.manifest,
                        layers=(*layers, *item.layers),
                        parameters=(*parameters, *item.parameters),
                        left_out=left_out,
                    )
                    self._labels = Labels(self.manifest)
                else:
                    moment, weights = item
                    self._seal()
                    if isinstance(moment, NewTotals):
                        manifest = self._with_snapshot(moment.step, weights)
                        self._publish(write_totals(self.folder, replace(manifest, columns=self._columns), moment))
                        self._release(moment.nbytes)
                    else:
                        # A snapshot of steps that never arrived would be of no use
                        if moment <= self.manifest.end_step or self.manifest.keep == "totals":
                            self._publish(self._with_snapshot(moment, weights))
                        self._release(sum(t.nbytes for t in weights.values()))
                    self._remove_old_snapshots()
        except BaseException as failure:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.folder / f".{chunk_name(len(self.manifest.chunks))}", ignore_errors=True)
            with self._room:
                self._failure, self.failed = failure, True
                self._room.notify_all()

    def _seal(self, ended: str | None = None) -> None:
        if not self._steps and ended is None:
            return
        inexact = dict(self.manifest.inexact)
        for step in self._steps:
            for layer, mark in step.marks.items():
                inexact.setdefault(layer, mark)  # the first one counts
        rows = dict(self.manifest.rows)
        for step in self._steps:
            rows |= step.row_evidence
        left_out = {**self.manifest.left_out, **self._left_out}
        manifest = replace(
            self.manifest, columns=self._columns, ended=ended, inexact=inexact, rows=rows, left_out=left_out
        )
        if self._steps and manifest.keep != "totals":
            chunk = self._write_chunk(len(manifest.chunks), self._columns)
            manifest = replace(manifest, chunks=(*manifest.chunks, chunk))
        self._publish(manifest)
        for step in self._steps:
            for block in step.blocks:
                block.give_back(self._pool)
        self._release(self._steps_bytes)
        self._steps, self._steps_bytes, self._sealed_at = [], 0, time.monotonic()

    def _write_chunk(self, number: int, columns: Sequence[Column]) -> Chunk:
        steps = self._steps
        unfinished = self.folder / f".{chunk_name(number)}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        rows = tables.rows_table(steps, columns)
        first_keys = [equal.stored for equal in self._equal]
        tensors, slots = slot_tensors(steps, self._equal)
        keys = tuple(equal.stored - before for equal, before in zip(self._equal, first_keys, strict=True))
        chunk = Chunk(steps[0].number, steps[-1].number + 1, self._next_row, rows.height, slots, keys, files={})
        place = chunk_about(chunk, self._slots, first_keys)
        labels = {name: self._labels.write(f"{chunk_name(number)}/{name}", place) for name in CHUNK_FILES}
        files = {SLOTS: write_tensors(unfinished / SLOTS, tensors, labels[SLOTS])}
        for name, table in (
            (ROWS, rows),
            (UPDATES, tables.updates_table(steps)),
            (STEPS, tables.steps_table(steps)),
        ):
            files[name] = write_table(unfinished / name, table, labels[name])
        flush_folder(unfinished)
        shutil.rmtree(self.folder / chunk_name(number), ignore_errors=True)  # left by a run that was resumed earlier
        unfinished.rename(self.folder / chunk_name(number))
        self._next_row += rows.height
        self._slots = [before + new for before, new in zip(self._slots, slots, strict=True)]
        return replace(chunk, files=files)

    def _with_snapshot(self, step: int, tensors: dict[str, Tensor]) -> Manifest:
        """Write a snapshot; gives the manifest that names it."""
        if any(snapshot.step == step for snapshot in self.manifest.snapshots):
            return self.manifest  # the same weights; a named file is never written again
        name = snapshot_name(step)
        label = self._labels.write(name, {})
        file = write_tensors(self.folder / f".{name}", {key: [t.numpy()] for key, t in tensors.items()}, label)
        (self.folder / f".{name}").replace(self.folder / name)
        kept = self.manifest.snapshots
        if self.manifest.keep == "totals":  # disk does not grow with the number of steps
            kept = tuple(s for s in kept if s.step == 0)
        return replace(self.manifest, snapshots=(*kept, Snapshot(step, file)))

    def _remove_old_snapshots(self) -> None:
        named = {snapshot_name(snapshot.step) for snapshot in self.manifest.snapshots}
        for path in self.folder.glob("snapshot-*.safetensors"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _publish(self, manifest: Manifest) -> None:
        publish(self.folder, manifest)
        self.manifest = manifest


def _equal_keys(folder: Path, manifest: Manifest) -> list[EqualKeys]:
    """The keys that a resumed recording holds already, found again by content."""
    equal = [EqualKeys(sum(chunk.keys[n] for chunk in manifest.chunks)) for n in range(len(manifest.layers))]
    if manifest.chunks:
        store = Store(folder, manifest)
        for number, layer in enumerate(manifest.layers):
            if any(chunk.key_numbers is not None for chunk in store.chunks(layer.name)):
                for first, keys in store.stored(layer.name, "key"):
                    equal[number].learn(keys, first)
    return equal
