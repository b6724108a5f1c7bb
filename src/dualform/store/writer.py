"""The writer: collects steps into chunks and seals them, in a thread of its own, with bounded memory.

Order of a seal: files, their folder, its rename, the store's folder, then the manifest that names it. Whatever happens
in between, the manifest on disk names only what is whole.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

import numpy as np
import polars as pl
from torch import Tensor

from dualform.errors import StoreExistsError, WriterError
from dualform.store import tables
from dualform.store.encoding import Encoded, Pool, Slab
from dualform.store.equal import EqualKeys
from dualform.store.format import (
    BLOCK_FIELDS,
    LOCK,
    MANIFEST,
    ROWS,
    SLOTS,
    STEPS,
    SUMS,
    UPDATES,
    Chunk,
    Column,
    File,
    Grouping,
    Layer,
    Manifest,
    Mark,
    Parameter,
    Snapshot,
    Totals,
    checksum,
    chunk_name,
    groups_name,
    load_manifest,
    snapshot_name,
    totals_name,
)
from dualform.store.reader import Store
from dualform.store.records import Block, Step
from dualform.store.safe import Array, write_tensors

try:
    import fcntl
except ImportError:  # Windows: the second writer is then found by the folder's content alone
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class NewLayer:
    """A module's layers that entered during training."""

    module: str
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]


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
        """How much memory it takes, roughly."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


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
        self.manifest = manifest  # changed by the background thread alone
        self._columns = manifest.columns
        self._left_out: dict[str, str] = {}
        self._queue_bytes, self._chunk_bytes, self._seal_seconds = queue_bytes, chunk_bytes, seal_seconds
        self._lock_file = _lock(folder)
        self._pool = pool
        self._equal = _equal_keys(folder, manifest)
        self._inbox: queue.SimpleQueue[
            list[Step] | tuple[int | NewTotals, dict[str, Tensor]] | NewLayer | threading.Event | str | None
        ] = queue.SimpleQueue()
        self._held = 0
        self._room = threading.Condition()
        self._failure: BaseException | None = None
        self._waiting: list[Step] = []
        self._waiting_bytes, self._turn_bytes = 0, min(chunk_bytes, queue_bytes) // 4
        self._steps: list[Step] = []
        self._steps_bytes = 0
        self._next_row = manifest.chunks[-1].first_row + manifest.chunks[-1].rows if manifest.chunks else 0
        self._sealed_at = time.monotonic()
        # There is never a manifest without the weights it began with
        self._publish(self._with_snapshot(manifest.end_step, weights))
        self._thread = threading.Thread(target=self._work, name="dualform-writer", daemon=True)
        self._thread.start()

    def put(self, step: Step, columns: Sequence[Column]) -> None:
        """Hand over a step; waits while more than queue_bytes are on their way to the disk."""
        self._columns = tuple(columns)
        self._hold(step.nbytes)
        self._waiting.append(step)
        self._waiting_bytes += step.nbytes
        if self._waiting_bytes >= self._turn_bytes:
            self._pass_on()

    def _pass_on(self) -> None:
        """Wake the background thread: not for every step, for each turn of it holds up the training."""
        if self._waiting:
            self._inbox.put(self._waiting)
            self._waiting, self._waiting_bytes = [], 0

    def snapshot(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Hand over all weights and optimizer state after `step` updates; the tensors must be copies."""
        self._hold(sum(t.nbytes for t in tensors.values()))
        self._pass_on()
        self._inbox.put((step, tensors))

    def totals(self, totals: NewTotals, weights: dict[str, Tensor]) -> None:
        """Hand over all totals, which replace those before, with a snapshot of the same moment."""
        self._hold(totals.nbytes)
        self._pass_on()
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

    @property
    def failed(self) -> bool:
        """Whether something went wrong in the background."""
        return self._failure is not None

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
                f"writing {self.folder} failed: {self._failure}. The store holds what was sealed before, up to step "
                f"{self.manifest.end_step}; it opens with dualform.open()."
            ) from self._failure

    def _hold(self, nbytes: int) -> None:
        with self._room:
            while self._failure is None and self._held and self._held + nbytes > self._queue_bytes:
                self._pass_on()
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
                    self.manifest = replace(
                        self.manifest,
                        layers=(*layers, *item.layers),
                        parameters=(*parameters, *item.parameters),
                        left_out=left_out,
                    )
                else:
                    moment, weights = item
                    self._seal()
                    if isinstance(moment, NewTotals):
                        manifest = self._with_snapshot(moment.step, weights)
                        self._publish(write_totals(self.folder, replace(manifest, columns=self._columns), moment))
                        self._release(moment.nbytes)
                    else:
                        self._publish(self._with_snapshot(moment, weights))
                        self._release(sum(t.nbytes for t in weights.values()))
                    self._remove_old_snapshots()
        except BaseException as failure:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.folder / f".{chunk_name(len(self.manifest.chunks))}", ignore_errors=True)
            with self._room:
                self._failure = failure
                self._room.notify_all()

    def _seal(self, ended: str | None = None) -> None:
        if not self._steps and ended is None:
            return
        marks = {layer: Mark(step.number, why) for step in self._steps for layer, why in step.marks.items()}
        inexact = {**marks, **self.manifest.inexact}
        left_out = {**self.manifest.left_out, **self._left_out}
        manifest = replace(self.manifest, columns=self._columns, ended=ended, inexact=inexact, left_out=left_out)
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
        before = [equal.stored for equal in self._equal]
        tensors, slots = _slot_tensors(steps, self._equal)
        keys = tuple(equal.stored - stored for equal, stored in zip(self._equal, before, strict=True))
        files = {SLOTS: write_tensors(unfinished / SLOTS, tensors)}
        for name, table in (
            (ROWS, rows),
            (UPDATES, tables.updates_table(steps)),
            (STEPS, tables.steps_table(steps)),
        ):
            files[name] = _write_table(unfinished / name, table)
        _flush_folder(unfinished)
        shutil.rmtree(self.folder / chunk_name(number), ignore_errors=True)  # left by a run that was resumed earlier
        unfinished.rename(self.folder / chunk_name(number))
        first_row, self._next_row = self._next_row, self._next_row + rows.height
        return Chunk(steps[0].number, steps[-1].number + 1, first_row, rows.height, slots, keys, files)

    def _with_snapshot(self, step: int, tensors: dict[str, Tensor]) -> Manifest:
        """Write a snapshot; gives the manifest that names it."""
        if any(snapshot.step == step for snapshot in self.manifest.snapshots):
            return self.manifest  # the same weights; a named file is never written again
        name = snapshot_name(step)
        file = write_tensors(self.folder / f".{name}", {key: [t.numpy()] for key, t in tensors.items()})
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


def _joined(vectors: Sequence[Encoded]) -> list[Array]:
    """The stored vectors, those that follow each other in memory as one: fewer calls for the writer's thread."""
    stretches: list[tuple[Slab | None, Tensor]] = []
    for one in vectors:
        slab, data = stretches[-1] if stretches else (None, one.data)
        if slab is not None and slab is one.slab and data.data_ptr() + data.nbytes == one.data.data_ptr():
            first = data.storage_offset() // data.shape[1]
            stretches[-1] = (slab, slab.memory[first : first + len(data) + len(one.data)])
        else:
            stretches.append((one.slab, one.data))
    return [data.numpy() for _, data in stretches]


def publish(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest, once everything that it names is on the disk."""
    _flush_folder(folder)
    unfinished = folder / f".{MANIFEST}"
    with unfinished.open("wb") as file:
        file.write(manifest.dump())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MANIFEST)
    _flush_folder(folder)


def write_totals(folder: Path, manifest: Manifest, new: NewTotals) -> Manifest:
    """Write a folder of totals; gives the manifest that names it. Totals of other steps are removed."""
    number = manifest.totals.number + 1 if manifest.totals else 0
    target, unfinished = folder / totals_name(number), folder / f".{totals_name(number)}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    files = {SUMS: write_tensors(unfinished / SUMS, {name: [t.numpy()] for name, t in new.tensors.items()})}
    for grouping, table in enumerate(new.groups):
        files[groups_name(grouping)] = _write_table(unfinished / groups_name(grouping), table)
    _flush_folder(unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    written = replace(manifest, totals=Totals(number, new.step, new.rows, tuple(new.groupings), files))
    publish(folder, written)
    for path in folder.glob("totals-*"):
        if path.name != target.name:
            shutil.rmtree(path, ignore_errors=True)
    return written


def _equal_keys(folder: Path, manifest: Manifest) -> list[EqualKeys]:
    """The keys that a resumed recording holds already, found again by content."""
    equal = [EqualKeys(sum(chunk.keys[n] for chunk in manifest.chunks)) for n in range(len(manifest.layers))]
    if manifest.chunks:
        store = Store(folder, manifest)
        for number, layer in enumerate(manifest.layers):
            if any(chunk.key_numbers is not None for chunk in store.chunks(layer.name)):
                for first, keys in store.stored_keys(layer.name):
                    equal[number].learn(keys, first)
    return equal


def _slot_tensors(
    steps: Sequence[Step], equal: Sequence[EqualKeys]
) -> tuple[dict[str, Sequence[Array]], tuple[int, ...]]:
    tensors: dict[str, Sequence[Array]] = {}
    slots = []
    for layer in range(len(equal)):
        blocks = [(step.number, block) for step in steps for block in step.blocks if block.layer == layer]
        slots.append(sum(block.rows * block.positions for _, block in blocks))
        if not blocks:
            continue
        table = [(number, b.backward, b.call, b.first_row, b.rows, b.positions) for number, b in blocks]
        tensors[f"{layer}.blocks"] = [np.array(table, dtype=np.int64).reshape(-1, len(BLOCK_FIELDS))]
        tensors.update(_keys(layer, [b for _, b in blocks], equal[layer]))
        if blocks[0][1].shape:
            tensors[f"{layer}.shapes"] = [np.array([b.shape for _, b in blocks], dtype=np.int64)]
        tensors.update(_vectors(f"{layer}.error", [b.errors for _, b in blocks if b.errors is not None]))
    gradients: dict[str, list[Array]] = {}
    for step in steps:
        for update in step.updates:
            if update.gradient is not None:
                gradients.setdefault(f"gradient.{update.parameter}", []).append(update.gradient.numpy()[None])
    return {**tensors, **gradients}, tuple(slots)


def _keys(layer: int, blocks: Sequence[Block], equal: EqualKeys) -> dict[str, Sequence[Array]]:
    """The keys that are new, and, where some are not, the number of each slot's key."""
    if blocks[0].shape:  # feature maps may differ in size: one after the other, flat
        equal.stored += sum(len(block.keys.data) for block in blocks)
        found = _vectors(f"{layer}.key", [block.keys for block in blocks])
        return {**found, f"{layer}.keys": [block.keys.data.numpy().reshape(-1) for block in blocks]}
    if not any(block.may_repeat for block in blocks):
        equal.stored += sum(len(block.keys.data) for block in blocks)
        return _vectors(f"{layer}.key", [block.keys for block in blocks])
    numbers, new = [], []
    for block in blocks:
        numbered, places = equal.number(block.keys, may_repeat=block.may_repeat)
        numbers.append(numbered)
        if places is None or len(places) == len(block.keys.data):
            new.append(block.keys)
        elif len(places):
            new.append(block.keys.take(places))
    return {f"{layer}.key_numbers": numbers, **_vectors(f"{layer}.key", new)}


def _vectors(name: str, vectors: Sequence[Encoded]) -> dict[str, Sequence[Array]]:
    if not vectors:
        return {}
    tensors: dict[str, Sequence[Array]] = {f"{name}s": _joined(vectors)}
    if vectors[0].exponents is not None:
        exponents = [v.exponents.numpy() for v in vectors if v.exponents is not None]
        tensors[f"{name}_exponents"] = [np.concatenate(exponents)]
    return tensors


def _write_table(path: Path, table: pl.DataFrame) -> File:
    table.write_parquet(path, compression="zstd", statistics=False)
    _flush_file(path)
    return File(path.stat().st_size, checksum(path.read_bytes()))


def _flush_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> TextIO | None:
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        return None
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StoreExistsError(
            f"{folder} is being written by another recorder (it holds {LOCK}). Record into another folder, or wait."
        ) from None
    return file


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a store against other writers; it must exist."""
    load_manifest(folder)
    lock = _lock(folder)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def prepare(folder: Path, *, overwrite: bool) -> None:
    """Make room for a new store, or say why not. Only a recording is ever overwritten."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StoreExistsError(f"{folder} is a file; a recording is a folder. Choose another path.")
    if not any(folder.iterdir()):
        return
    begun = (folder / MANIFEST).exists()  # else at most the leftovers of a recording killed before its first manifest
    foreign = begun and b'"format": "dualform"' not in (folder / MANIFEST).read_bytes()
    if foreign or (not begun and not all(_ours(path.name) for path in folder.iterdir())):
        raise StoreExistsError(f"{folder} is not empty and holds no recording. Choose another path.")
    if begun and not overwrite:
        raise StoreExistsError(
            f"{folder} holds a recording already. Choose another path, or say overwrite=True to replace it."
        )
    lock = _lock(folder)
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in folder.iterdir():
            if _ours(path.name) and path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        if lock is not None:
            lock.close()


def _ours(name: str) -> bool:
    """Whether a file or folder is part of a store."""
    return name in (MANIFEST, LOCK) or name.lstrip(".").startswith(("chunk-", "snapshot-", "totals-", MANIFEST))
