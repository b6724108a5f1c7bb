"""The reader: opens a store by its manifest alone, maps chunks into memory, checks every file at its first touch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualform.errors import NotRecordedError, StoreDamagedError, UnknownLayerError
from dualform.layers.keys import Keys, Maps, Numbers, Vectors
from dualform.store import tables
from dualform.store.encoding import Encoded, decode
from dualform.store.format import (
    BLOCK_FIELDS,
    CHUNK_FILES,
    ROWS,
    SLOTS,
    STEPS,
    SUMS,
    UPDATES,
    Chunk,
    File,
    Layer,
    Manifest,
    Totals,
    checksum,
    chunk_name,
    groups_name,
    load_manifest,
    snapshot_name,
    totals_name,
)

Ints = np.ndarray[Any, np.dtype[np.int64]]
N = TypeVar("N", bound=np.generic)
PIECE_BYTES = 32 << 20
"""How much of a chunk is decoded at a time."""


class Store:
    """A recording on disk, as far as it is sealed."""

    def __init__(self, folder: str | Path, manifest: Manifest | None = None):
        """manifest: another one than that on disk, for who knows what they do."""
        self.folder = Path(folder)
        self.manifest = _padded(load_manifest(self.folder) if manifest is None else manifest)
        for number, chunk in enumerate(self.manifest.chunks):
            if set(chunk.files) != set(CHUNK_FILES) or not (
                len(chunk.slots) == len(chunk.keys) == len(self.manifest.layers)
            ):
                raise StoreDamagedError(f"the manifest of {self.folder} is damaged: chunk {number} is not as expected.")
            for name in CHUNK_FILES:
                self._check_size(self.folder / chunk_name(number) / name, chunk.files[name])
        for snapshot in self.manifest.snapshots:
            self._check_size(self.folder / snapshot_name(snapshot.step), snapshot.file)
        if self.manifest.totals is not None:
            for name, file in self.manifest.totals.files.items():
                if name not in (SUMS, *map(groups_name, range(len(self.manifest.totals.groupings)))):
                    raise StoreDamagedError(
                        f"the manifest of {self.folder} is damaged: its totals are not as expected."
                    )
                self._check_size(self.folder / totals_name(self.manifest.totals.number) / name, file)
        self._tensors: dict[Path, TensorFile] = {}

    @property
    def end_step(self) -> int:
        """How many steps are sealed."""
        return self.manifest.end_step

    @cached_property
    def rows(self) -> pl.DataFrame:
        """The row table: `step` and the user's columns; a row's number is its place."""
        empty = pl.DataFrame(schema=tables.schema(self.manifest.columns))
        return pl.concat([empty, *(self.rows_in(place) for place in range(len(self.manifest.chunks)))])

    def rows_in(self, place: int) -> pl.DataFrame:
        """The rows of one chunk."""
        return self._table(place, ROWS)

    @cached_property
    def updates(self) -> pl.DataFrame:
        """One line for each (step, parameter): the optimizer's settings, factors and the audit's residual."""
        pieces = [self.updates_in(place) for place in range(len(self.manifest.chunks))]
        return pl.concat(pieces, how="diagonal") if pieces else tables.updates_table([])

    def updates_in(self, place: int) -> pl.DataFrame:
        """The updates of one chunk."""
        return self._table(place, UPDATES)

    @cached_property
    def log(self) -> pl.DataFrame:
        """One line for each step, with what recorder.log() was given."""
        pieces = [self._table(n, STEPS) for n in range(len(self.manifest.chunks))]
        return pl.concat(pieces, how="diagonal") if pieces else tables.steps_table([])

    @cached_property
    def nbytes(self) -> int:
        """How much disk the store takes."""
        chunks = sum(file.size for chunk in self.manifest.chunks for file in chunk.files.values())
        totals = sum(file.size for file in self.manifest.totals.files.values()) if self.manifest.totals else 0
        return chunks + totals + sum(snapshot.file.size for snapshot in self.manifest.snapshots)

    def layer(self, name: str) -> tuple[int, Layer]:
        """The number and description of a layer."""
        for number, layer in enumerate(self.manifest.layers):
            if layer.name == name:
                return number, layer
        known = ", ".join(repr(layer.name) for layer in self.manifest.layers)
        why = self.manifest.left_out.get(name)
        raise UnknownLayerError(
            f"layer {name!r} was not recorded{f': {why}' if why else ''}. Recorded layers: {known or 'none'}."
        )

    def slots(self, name: str) -> int:
        """How many slots a layer has."""
        number, _ = self.layer(name)
        return sum(chunk.slots[number] for chunk in self.manifest.chunks)

    def chunks(self, name: str, *, begin_step: int = 0, end_step: int | None = None) -> Iterator[SlotChunk]:
        """A layer's slots, chunk by chunk in the order of their numbers.

        Chunks that end before begin_step are passed over; slots from end_step on are cut off.
        """
        number, layer = self.layer(name)
        first_slot = 0
        for place, chunk in enumerate(self.manifest.chunks):
            if end_step is not None and chunk.first_step >= end_step:
                return
            if chunk.slots[number] and chunk.end_step > begin_step:
                yield SlotChunk(self, self._chunk_file(place), number, layer, first_slot, chunk, end_step)
            first_slot += chunk.slots[number]

    def chunk_of(self, name: str, place: int, end_step: int | None = None) -> SlotChunk | None:
        """A layer's slots in one chunk; None if it has none there."""
        number, layer = self.layer(name)
        chunks = self.manifest.chunks
        if not chunks[place].slots[number]:
            return None
        first = sum(chunk.slots[number] for chunk in chunks[:place])
        return SlotChunk(self, self._chunk_file(place), number, layer, first, chunks[place], end_step)

    def users(self, parameter: str) -> list[Layer]:
        """The layers whose slots make up a parameter."""
        return [layer for layer in self.manifest.layers if parameter in layer.parameters]

    def has_equal_keys(self, name: str) -> bool:
        """Whether some of a layer's slots share a stored key."""
        number, layer = self.layer(name)
        return layer.form == "vectors" and any(
            chunk.keys[number] < chunk.slots[number] for chunk in self.manifest.chunks
        )

    def key_count(self, name: str) -> int:
        """How many keys a layer has in store: fewer than slots, where equal keys are stored once."""
        number, _ = self.layer(name)
        return sum(chunk.keys[number] for chunk in self.manifest.chunks)

    def distinct_keys(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """The stored keys of a layer, chunk by chunk: (number of the first, keys (n, d_in))."""
        for first, keys in self.stored_keys(name):
            yield first, decode(keys.data, keys.exponents, dtype)

    def stored_keys(self, name: str) -> Iterator[tuple[int, Encoded]]:
        """The same, as they are stored."""
        number, _ = self.layer(name)
        first = 0
        for place, chunk in enumerate(self.manifest.chunks):
            count = chunk.keys[number]
            if count:
                data, scales = self._stored_keys(self._chunk_file(place), number)
                yield first, Encoded(data[:count], None if scales is None else scales[:count])
            first += count

    def gather_keys(self, number: int, wanted: Ints, dtype: torch.dtype) -> Tensor:
        """Keys by their numbers, from whichever chunk holds them, (n, d_in)."""
        ends = np.cumsum([chunk.keys[number] for chunk in self.manifest.chunks])
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= ends[-1]):
            raise StoreDamagedError(f"{self.folder} is damaged: a slot names a key that is not there.")
        home = np.searchsorted(ends, wanted, side="right")
        gathered = torch.empty(len(wanted), self.manifest.layers[number].d_in, dtype=dtype)
        for place in np.unique(home).tolist():
            here = np.flatnonzero(home == place)
            rows = torch.from_numpy(wanted[here] - (ends[place] - self.manifest.chunks[place].keys[number]))
            data, scales = self._stored_keys(self._chunk_file(place), number)
            gathered[torch.from_numpy(here)] = decode(data[rows], None if scales is None else scales[rows], dtype)
        return gathered

    def _stored_keys(self, file: TensorFile, number: int) -> tuple[Tensor, Tensor | None]:
        exponents = f"{number}.key_exponents"
        return file[f"{number}.keys"], file[exponents] if exponents in file else None

    def _chunk_file(self, place: int) -> TensorFile:
        return self._file(self.folder / chunk_name(place) / SLOTS, self.manifest.chunks[place].files[SLOTS])

    def gradients(self, parameter: str) -> Tensor | None:
        """The kept gradients of a parameter, (updates, *shape) in the order of its updates; None: not kept."""
        found = (self.gradients_in(place, parameter) for place in range(len(self.manifest.chunks)))
        pieces = [some for some in found if some is not None]
        return torch.cat(pieces) if pieces else None

    def gradients_in(self, place: int, parameter: str) -> Tensor | None:
        """The kept gradients of a parameter in one chunk."""
        number = self.parameter(parameter)
        file = self._chunk_file(place)
        if f"gradient.{number}" not in file:
            return None
        kept = self.updates_in(place).filter((pl.col("parameter") == number) & pl.col("gradient_kept")).height
        return file[f"gradient.{number}"][:kept]

    def slot_table(self, chunk: SlotChunk, columns: list[str]) -> pl.DataFrame:
        """One line for each slot of a chunk: these columns of its row, and its `position`.

        A column per position gives each slot its own entry; null where the layer has another number of positions.
        """
        table = pl.DataFrame(
            {"position": chunk.positions(), "positions": chunk.per_slot(chunk.blocks[:, 5])},
            schema={"position": pl.Int64, "positions": pl.Int64},
        )
        if columns:
            table = pl.concat([self.rows.select(columns)[chunk.rows()], table], how="horizontal")
        for column in self.manifest.columns:
            if column.per == "position" and column.name in columns:
                fits = pl.col(column.name).list.len() == pl.col("positions")
                entry = pl.col(column.name).list.get(pl.col("position"), null_on_oob=True)
                table = table.with_columns(pl.when(fits).then(entry).alias(column.name))
        return table.drop("positions")

    def parameter(self, name: str) -> int:
        """The number of a recorded parameter."""
        for number, parameter in enumerate(self.manifest.parameters):
            if parameter.name == name:
                return number
        raise UnknownLayerError(f"parameter {name!r} was not recorded.")

    def snapshot_steps(self) -> list[int]:
        """After how many steps there are snapshots, ascending, as far as the slots are sealed."""
        return sorted(s.step for s in self.manifest.snapshots if s.step <= self.end_step)

    def snapshot(self, step: int) -> TensorFile:
        """The weights, buffers and optimizer state after `step` updates."""
        for snapshot in self.manifest.snapshots:
            if snapshot.step == step:
                return self._file(self.folder / snapshot_name(step), snapshot.file)
        raise NotRecordedError(f"there is no snapshot at step {step}; there are: {self.snapshot_steps()}.")

    def totals(self) -> TensorFile:
        """The tensors of the totals; totals/fold.py says what they are."""
        totals = self._totals()
        return self._file(self.folder / totals_name(totals.number) / SUMS, totals.files[SUMS])

    def groups(self, grouping: int) -> pl.DataFrame:
        """The groups of a grouping, in the order of their numbers."""
        totals = self._totals()
        name = groups_name(grouping)
        return self._read_table(self.folder / totals_name(totals.number) / name, totals.files[name])

    def _totals(self) -> Totals:
        if self.manifest.totals is None:
            raise NotRecordedError(
                f"{self.folder} has no totals. Record with totals=[…], or build them: dualform totals RUN --by COLUMN."
            )
        return self.manifest.totals

    def _file(self, path: Path, file: File) -> TensorFile:
        if path not in self._tensors:
            self._tensors[path] = TensorFile(path, file)
        return self._tensors[path]

    def _table(self, number: int, name: str) -> pl.DataFrame:
        chunk = self.manifest.chunks[number]
        table = self._read_table(self.folder / chunk_name(number) / name, chunk.files[name])
        return table.filter(pl.col("step") < chunk.end_step)

    def _read_table(self, path: Path, file: File) -> pl.DataFrame:
        data = path.read_bytes()
        if checksum(data) != file.checksum:
            raise StoreDamagedError(f"{path} is damaged: its checksum does not fit the manifest.")
        return pl.read_parquet(io.BytesIO(data))

    def _check_size(self, path: Path, file: File) -> None:
        try:
            size = path.stat().st_size
        except OSError:
            raise StoreDamagedError(f"{path} is missing, though the manifest names it.") from None
        if size != file.size:
            raise StoreDamagedError(f"{path} is damaged: it has {size:,} bytes, the manifest says {file.size:,}.")


def _padded(manifest: Manifest) -> Manifest:
    """Chunks from before a layer entered have none of its slots."""
    count = len(manifest.layers)
    chunks = (replace(chunk, slots=_pad(chunk.slots, count), keys=_pad(chunk.keys, count)) for chunk in manifest.chunks)
    return replace(manifest, chunks=tuple(chunks))


def _pad(counts: tuple[int, ...], length: int) -> tuple[int, ...]:
    return counts + (0,) * (length - len(counts))


class TensorFile:
    """A safetensors file, mapped into memory; header and tensors are checked when they are first touched."""

    def __init__(self, path: Path, file: File):
        self.path = path
        with path.open("rb") as handle:
            length = handle.read(8)
            size = int.from_bytes(length, "little")
            header = length + (handle.read(size) if size <= file.size else b"")
        if checksum(header) != file.checksum:
            raise StoreDamagedError(f"{path} is damaged: the checksum of its header does not fit the manifest.")
        try:
            self._file = safe_open(path, "pt")
            self._sums: dict[str, str] = self._file.metadata() or {}  # type: ignore[no-untyped-call]
            self._names = set(self._file.keys())  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise StoreDamagedError(f"{path} is damaged: {error}.") from None
        self._checked: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, mapped: pages are read as they are used. Do not write to it."""
        if name not in self._checked:
            if name not in self._names:
                raise StoreDamagedError(f"{self.path} is damaged: it has no tensor {name!r}.")
            tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
            if checksum(tensor.reshape(-1).view(torch.uint8).numpy()) != self._sums.get(name):
                raise StoreDamagedError(f"{self.path} is damaged: the checksum of {name!r} does not fit.")
            self._checked[name] = tensor
        return self._checked[name]


@dataclass(frozen=True)
class SlotChunk:
    """The slots of one layer in one chunk. Slot i of the chunk has the number first_slot + i in the layer."""

    store: Store
    file: TensorFile
    number: int
    layer: Layer
    first_slot: int
    chunk: Chunk
    end_step: int | None

    @cached_property
    def blocks(self) -> Ints:
        """(blocks, 6): step, backward, call, first_row, rows, positions; up to end_step."""
        table: Ints = self.file[f"{self.number}.blocks"].numpy()
        if table.ndim == 2 and table.shape[1] == len(BLOCK_FIELDS):
            table = table[table[:, 0] < self.chunk.end_step]
            if int((table[:, 4] * table[:, 5]).sum()) == self.chunk.slots[self.number]:
                return table if self.end_step is None else table[table[:, 0] < self.end_step]
        raise StoreDamagedError(f"{self.file.path} is damaged: the blocks of {self.layer.name!r} do not add up.")

    @cached_property
    def counts(self) -> Ints:
        """(blocks,): how many slots each block has."""
        counts: Ints = self.blocks[:, 4] * self.blocks[:, 5]
        return counts

    @cached_property
    def slots(self) -> int:
        """How many slots there are, up to end_step."""
        return int(self.counts.sum())

    def per_slot(self, values: np.ndarray[Any, np.dtype[N]]) -> np.ndarray[Any, np.dtype[N]]:
        """(blocks,) → (slots,)."""
        return np.repeat(values, self.counts)

    @cached_property
    def place(self) -> Ints:
        """(slots,): the place of each slot within its block."""
        starts = np.cumsum(self.counts) - self.counts
        place: Ints = np.arange(self.slots) - self.per_slot(starts)
        return place

    def rows(self) -> Ints:
        """(slots,): the number of each slot's row."""
        positions = self.blocks[:, 5]
        within = self.place if (positions == 1).all() else self.place // self.per_slot(positions)
        rows: Ints = self.per_slot(self.blocks[:, 3]) + within
        return rows

    def positions(self) -> Ints:
        """(slots,): each slot's position within its row."""
        positions: Ints = self.place % self.per_slot(self.blocks[:, 5])
        return positions

    @cached_property
    def key_numbers(self) -> Ints | None:
        """(slots,): the number of each slot's key among the stored ones; None: each slot has its own, in order."""
        name = f"{self.number}.key_numbers"
        return self.file[name][: self.slots].numpy() if name in self.file else None

    @cached_property
    def starts(self) -> Ints:
        """(blocks,): where the slots of each block begin."""
        starts: Ints = np.cumsum(self.counts) - self.counts
        return starts

    @cached_property
    def shapes(self) -> Ints:
        """(blocks, …), for feature maps: how many there are for each row, and their size."""
        shapes: Ints = self.file[f"{self.number}.shapes"].numpy()[: len(self.blocks)]
        return shapes

    @property
    def stored_keys(self) -> int:
        """How many keys its own slots have in store, where each has one."""
        return self.slots if self.layer.form != "maps" else int((self.blocks[:, 4] * self.shapes[:, 0]).sum())

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """Cut the chunk into stretches of slots that decode to at most PIECE_BYTES; feature maps are not cut through."""
        size = max(1, PIECE_BYTES // (8 * max(width, 1)))
        if self.layer.form != "maps":
            for low in range(0, self.slots, size):
                yield low, min(low + size, self.slots)
            return
        for start, rows, positions in zip(self.starts.tolist(), *self.blocks[:, 4:6].T.tolist(), strict=True):
            some = max(1, size // max(positions, 1))
            for low in range(0, rows, some):
                yield start + low * positions, start + min(low + some, rows) * positions

    def keys(self, dtype: torch.dtype, low: int = 0, high: int | None = None) -> Keys:
        """The keys of the slots low to high; a mapped view if the stored type is the one asked for."""
        if self.layer.form == "maps":
            return self._maps(dtype, low, self.slots if high is None else high)
        if self.layer.form == "numbers":
            return Numbers(
                self.file[f"{self.number}.keys"][low : self.slots if high is None else high], self.layer.d_in, dtype
            )
        if self.key_numbers is not None:
            return Vectors(self.store.gather_keys(self.number, self.key_numbers[low:high], dtype))
        return Vectors(self._vectors("key", dtype, low, high))

    def _maps(self, dtype: torch.dtype, low: int, high: int) -> Maps:
        """The feature maps of some rows of one block."""
        assert self.layer.geometry is not None
        block = int(np.searchsorted(self.starts, low, side="right")) - 1
        while self.counts[block] == 0 and block + 1 < len(self.starts) and low < high:
            block += 1
        positions = int(self.blocks[block, 5])
        each, *size = self.shapes[block].tolist()
        first, last = ((place - int(self.starts[block])) // max(positions, 1) for place in (low, high))
        widths = self.layer.geometry.channels * self.shapes[:, 1:].prod(1)
        maps = self.blocks[:, 4] * self.shapes[:, 0]
        skipped, before = int((maps * widths)[:block].sum()), int(maps[:block].sum())
        width, count = int(widths[block]), (last - first) * each
        flat = self.file[f"{self.number}.keys"][skipped + first * each * width :][: count * width].reshape(count, width)
        name = f"{self.number}.key_exponents"
        scales = self.file[name][before + first * each :][:count] if name in self.file else None
        return Maps(
            decode(flat, scales, dtype).reshape(count, self.layer.geometry.channels, *size), self.layer.geometry
        )

    def errors(self, dtype: torch.dtype, low: int = 0, high: int | None = None) -> Tensor:
        """(slots, d_out), of the slots low to high."""
        return self._vectors("error", dtype, low, high)

    def _vectors(self, name: str, dtype: torch.dtype, low: int, high: int | None) -> Tensor:
        here = slice(low, self.slots if high is None else high)
        data = self.file[f"{self.number}.{name}s"]
        exponents = f"{self.number}.{name}_exponents"
        scales = self.file[exponents][here] if exponents in self.file else None
        return decode(data[here], scales, dtype)
