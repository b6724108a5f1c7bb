"""The reader: opens a store by its manifest alone, maps chunks into memory, checks every file at its first touch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.errors import StoreDamagedError
from dualform.layers.streams import Layer
from dualform.native.picked import Picked
from dualform.recursions import KINDS
from dualform.store import tables
from dualform.store.catalog import Catalog
from dualform.store.consistency import check_table, check_tensors
from dualform.store.encoding import Encoded, decode
from dualform.store.files import Files, address
from dualform.store.format import (
    ROWS,
    SLOTS,
    STEPS,
    UPDATES,
    Manifest,
    chunk_name,
)
from dualform.store.labels import Label, chunk_about, require_chunk, require_session
from dualform.store.memory import give_back
from dualform.store.slots import Ints, SlotChunk, stored_vectors
from dualform.store.tables import row_series, row_types
from dualform.store.tensors import TensorFile

STRETCH = 512
"""This many vectors are decoded at a time, so that they stay in the cache."""
READ_BYTES = 256 << 20
"""When chunks of this size together have been read, the memory that they were decoded into is given back."""


class Store(Catalog):
    """A recording on disk, as far as it is sealed. Threads may share it: what they find out twice is the same."""

    def __init__(self, files: Files, manifest: Manifest | None = None):
        """manifest: another one than that on disk (a resumed run)."""
        super().__init__(files, manifest)
        self._decoded_bytes = 0
        self._written: dict[int, Label] = {}
        """By chunk: what its files were written with."""
        self._cut_chunks: set[int] = set()
        """Chunks that a resumed run has cut, whose counts are yet to be checked."""
        self._slot_files: dict[int, TensorFile] = {}

    @cached_property
    def rows(self) -> pl.DataFrame:
        """The row table: `step` and the user's columns; a row's number is its place."""
        empty = pl.DataFrame(schema=row_types(self.manifest.columns))
        tables_of = (self.rows_in(place) for place in range(len(self.manifest.chunks)))
        return pl.concat([empty, *tables_of], rechunk=True)

    def _rows_or_nulls(self, rows: Ints, columns: list[str]) -> pl.DataFrame:
        """Rows by their numbers; a line of nulls for NO_ROW."""
        places = row_series(rows)
        if places.null_count():
            return self.rows.select(pl.col(columns).gather(places))
        # Column by column: a whole table's would be taken by Polars' threads, which wait for PyTorch's to sleep
        return pl.DataFrame([self.rows[name][rows] for name in columns])

    def rows_in(self, place: int) -> pl.DataFrame:
        """The rows of one chunk."""
        table = self._table(place, ROWS)
        if not table.height:  # columns are not known before the first row
            return pl.DataFrame(schema=row_types(self.manifest.columns))
        return table

    @cached_property
    def updates(self) -> pl.DataFrame:
        """One line for each (step, parameter): the optimizer's settings, factors and the audit's residual."""
        pieces = [self.updates_in(place) for place in range(len(self.manifest.chunks))]
        return pl.concat(pieces, how="diagonal") if pieces else tables.updates_table([])

    def updates_in(self, place: int) -> pl.DataFrame:
        """The updates of one chunk."""
        return self.cached(("updates", place), lambda: self._table(place, UPDATES))

    @cached_property
    def log(self) -> pl.DataFrame:
        """One line for each step, with what recorder.log() was given."""
        pieces = [self._table(n, STEPS) for n in range(len(self.manifest.chunks))]
        return pl.concat(pieces, how="diagonal") if pieces else tables.steps_table([])

    def slots(self, name: str) -> int:
        """How many slots a layer has."""
        number, _ = self.layer(name)
        return sum(chunk.slots[number] for chunk in self.manifest.chunks)

    def chunks(self, name: str, *, begin_step: int = 0, end_step: int | None = None) -> Iterator[SlotChunk]:
        """A layer's slots, chunk by chunk in the order of their numbers.

        Chunks that end before begin_step are passed over; slots from end_step on are cut off.
        """
        for chunk in self.addresses(name, begin_step=begin_step, end_step=end_step):
            yield chunk
            self.decoded(chunk.chunk.files[SLOTS].size)

    def addresses(self, name: str, *, begin_step: int = 0, end_step: int | None = None) -> Iterator[SlotChunk]:
        """The same, for callers that read no keys and error signals."""
        chunks = self.cached(("addresses", name), lambda: self._addresses(name, end_step), end_step)
        return (chunk for chunk in chunks if chunk.chunk.end_step > begin_step)

    def _addresses(self, name: str, end_step: int | None) -> list[SlotChunk]:
        found = []
        for place, chunk in enumerate(self.manifest.chunks):
            if end_step is not None and chunk.first_step >= end_step:
                break
            slots = self.chunk_of(name, place, end_step)
            if slots is not None:
                found.append(slots)
        return found

    def chunk_of(self, name: str, place: int, end_step: int | None = None) -> SlotChunk | None:
        """Return a layer's slots in one chunk; None if it has none there."""
        number, layer = self.layer(name)
        chunk = self.manifest.chunks[place]
        if not chunk.slots[number]:
            return None
        file = self._chunk_file(place)
        first_slots, first_keys = self._offsets
        return SlotChunk(
            store=self,
            file=file,
            number=number,
            layer=layer,
            first_slot=int(first_slots[place, number]),
            end_key=int(first_keys[place, number]) + chunk.keys[number],
            chunk=chunk,
            written=self._written[place],
            end_step=end_step,
        )

    @cached_property
    def _offsets(self) -> tuple[Ints, Ints]:
        """(chunks, layers): how many slots, and how many keys, of each layer come before each chunk."""
        shape = len(self.manifest.chunks), len(self.manifest.layers)
        slots = np.array([chunk.slots for chunk in self.manifest.chunks], dtype=np.int64).reshape(shape)
        keys = np.array([chunk.keys for chunk in self.manifest.chunks], dtype=np.int64).reshape(shape)
        return slots.cumsum(axis=0) - slots, keys.cumsum(axis=0) - keys

    def decoded(self, nbytes: int) -> None:
        """Take note that this many bytes of a chunk have been decoded and released. Returns memory to the system now and then."""
        self._decoded_bytes += nbytes
        if self._decoded_bytes >= READ_BYTES:
            give_back()
            self._decoded_bytes = 0

    def users(self, parameter: str) -> list[Layer]:
        """The layers whose slots make up a parameter."""
        return [layer for layer in self.manifest.layers if parameter in layer.parameters]

    def is_vector(self, parameter: str) -> bool:
        """Whether a parameter is a bias or an elementwise weight: its gradients are kept themselves."""
        return self.manifest.is_vector(parameter)

    def is_summed(self, name: str) -> bool:
        """Whether slots of a layer were summed row by row when they were recorded: then single positions are lost."""
        if self.manifest.keep != "rows":
            return False
        return self.cached(("is summed", name), lambda: any(chunk.is_summed for chunk in self.addresses(name)))

    def why_no_positions(self, name: str) -> str:
        """Why a layer whose rows were summed has no single positions, and what to do."""
        return (
            f'layer {name!r} keeps what each row adds up to over its positions (keep="rows" in {self.location}), so single positions, '
            f'their keys and attention weights are not known. Ask contributions() or influence() by row, or record with keep="slots".'
        )

    def has_equal_keys(self, name: str) -> bool:
        """Whether slots share stored keys; else the key of a slot has the slot's own number."""
        return self.cached(("has equal keys", name), lambda: self._find_equal_keys(name))

    def _find_equal_keys(self, name: str) -> bool:
        number, layer = self.layer(name)
        if layer.form != "vectors":
            return False
        if self.is_summed(name):
            return any(chunk.key_numbers is not None for chunk in self.addresses(name))
        if any(chunk.keys[number] != chunk.slots[number] for chunk in self.manifest.chunks):
            return True
        # As many need not be the same: a chunk that was cut (a resumed run) has all its keys, and only some of its slots
        for chunk in self.addresses(name):
            own = chunk.first_slot + np.arange(chunk.slots)
            if chunk.key_numbers is not None and not np.array_equal(chunk.key_numbers, own):
                return True
        return False

    def key_count(self, name: str) -> int:
        """How many keys a layer has in store: fewer than slots, where equal keys are stored once."""
        number, _ = self.layer(name)
        return sum(chunk.keys[number] for chunk in self.manifest.chunks)

    def passing(self, name: str, what: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """The stored vectors of a layer, decoded, some at a time: (number of the first, vectors)."""
        for first, chunk in self.stored(name, what):
            for low in range(0, len(chunk.data), STRETCH):
                here = slice(low, low + STRETCH)
                yield first + low, decode(chunk.data[here], chunk.scales(here), dtype)

    def stored(self, name: str, what: str) -> Iterator[tuple[int, Encoded]]:
        """Yield the keys or error signals of a layer as they are stored, chunk by chunk: (number of the first, vectors).

        what: "key" or "error".
        """
        number, _ = self.layer(name)
        first = 0
        for place, count in enumerate(self._counts(number, what)):
            if count:
                yield first, self._encoded(place, number, what).first_vectors(count)
            first += count

    def gather(self, number: int, what: str, wanted: Ints, dtype: torch.dtype) -> Tensor:
        """Return keys by their numbers, or error signals by those of their slots, from whichever chunk holds them, (n, d)."""
        counts = self._counts(number, what)
        ends = np.cumsum(counts)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= ends[-1]):
            raise StoreDamagedError(f"{self.location} is damaged: a slot names a key that is not there.")
        layer = self.manifest.layers[number]
        width = layer.d_in if what == "key" else len(layer.outputs) or layer.d_out
        gathered = torch.empty(len(wanted), width, dtype=dtype)
        home = np.searchsorted(ends, wanted, side="right")
        for place in np.unique(home).tolist():
            here = np.flatnonzero(home == place)
            rows = wanted[here] - (ends[place] - counts[place])
            vectors = self._encoded(place, number, what).some(torch.from_numpy(rows), dtype)
            gathered.index_copy_(0, torch.from_numpy(here), vectors)
        return gathered

    def picked(self, number: int, what: str) -> Picked:
        """Return all keys or error signals of a layer, for random access with few queries."""
        name = self.manifest.layers[number].name

        def find() -> Picked:
            return Picked([(vectors.data, vectors.exponents) for _, vectors in self.stored(name, what)])

        return self.cached(("picked", number, what), find)

    def _counts(self, number: int, what: str) -> list[int]:
        return [(chunk.keys if what == "key" else chunk.slots)[number] for chunk in self.manifest.chunks]

    def _encoded(self, place: int, number: int, what: str) -> Encoded:
        """Return a layer's vectors in one chunk."""
        return self.cached(
            ("vectors", place, number, what), lambda: stored_vectors(self._chunk_file(place), number, what)
        )

    def _chunk_file(self, place: int) -> TensorFile:
        """The slots of a chunk, once their label and their shapes are known to fit the manifest."""
        if place not in self._slot_files:
            file = self.manifest.chunks[place].files[SLOTS]
            opened = self._open(TensorFile, _path(place, SLOTS), file, lambda label: self._check_place(place, label))
            try:
                check_tensors(opened, self.manifest, self._written[place])
            except ValueError as error:
                raise StoreDamagedError(f"{opened.path} is damaged: {error}.") from None
            self._slot_files[place] = opened
            self._check_cut(place)
        return self._slot_files[place]

    def _check_place(self, place: int, label: Label) -> None:
        """Compare the label of a chunk's file with the manifest. Raises ValueError, which says what does not fit."""
        first_slots, first_keys = self._offsets
        about = chunk_about(self.manifest.chunks[place], first_slots[place].tolist(), first_keys[place].tolist())
        require_session(label, [self.manifest.session_of(self.manifest.chunks[place].first_step)])
        if place not in self._written:
            self._written[place] = require_chunk(label, about)
            if self._written[place]["end_step"] > about["end_step"]:
                self._cut_chunks.add(place)
        elif require_chunk(label, about) != self._written[place]:
            raise ValueError("the files of its chunk were not written together")

    def _check_cut(self, place: int) -> None:
        """Count rows, slots and keys of a chunk that a resumed run has cut: its label says only how many there were before."""
        if place not in self._cut_chunks:
            return
        self._cut_chunks.discard(place)  # reading its files ends up here again
        chunk = self.manifest.chunks[place]
        counted = [self._cut_counts(place, number) for number in range(len(self.manifest.layers))]
        rows = self._table(place, ROWS).height
        if rows != chunk.rows or counted != list(zip(chunk.slots, chunk.keys, strict=True)):
            raise StoreDamagedError(
                f"the manifest of {self.location} is damaged: chunk {place} has other counts up to step {chunk.end_step}."
            )

    def _cut_counts(self, place: int, number: int) -> tuple[int, int]:
        """How many slots and keys a layer has in a chunk, up to the chunk's last step."""
        file = self._chunk_file(place)
        chunk = self.manifest.chunks[place]
        if not any(name.startswith(f"{number}.") for name in file):
            return 0, 0
        blocks = file[f"{number}.blocks"].numpy()
        blocks = blocks[blocks[:, 0] < chunk.end_step]
        slots = int((blocks[:, 4] * blocks[:, 5]).sum())
        if not slots:
            return 0, 0
        if f"{number}.key_numbers" in file:
            return slots, self._written[place]["keys"][number]
        if f"{number}.sums" in file:  # the gradients of rows have no keys
            blocks_of_slots = file[f"{number}.sums"].numpy()[: len(blocks), 0] == 0
        else:
            blocks_of_slots = np.ones(len(blocks), np.bool_)
        per_row = blocks[:, 5]
        if self.manifest.layers[number].form == "maps":
            per_row = file[f"{number}.shapes"].numpy()[: len(blocks), 0]
        return slots, int((blocks[:, 4] * per_row)[blocks_of_slots].sum())

    def gradients(self, parameter: str) -> Tensor | None:
        """The kept gradients of a parameter, (updates, *shape) in the order of its updates; None: not kept."""
        found = (self.gradients_in(place, parameter) for place in range(len(self.manifest.chunks)))
        pieces = [some for some in found if some is not None]
        return torch.cat(pieces) if pieces else None

    def gradients_in(self, place: int, parameter: str) -> Tensor | None:
        """The kept gradients of a parameter in one chunk."""
        number = self.parameter(parameter)
        file = self._chunk_file(place)
        name = f"gradient.{number}"
        kept = self.updates_in(place).filter((pl.col("parameter") == number) & pl.col("gradient_kept")).height
        stored = file.shape(name)[0] if name in file else 0
        if kept > stored:
            raise StoreDamagedError(
                f"{file.path} is damaged: it has {stored} gradients of {parameter!r}, the updates of its chunk say {kept}."
            )
        return file[name][:kept] if name in file else None

    def slot_table(self, chunk: SlotChunk, columns: list[str]) -> pl.DataFrame:
        """One line for each slot of a chunk: these columns of its row, and its `position`.

        A slot that serves all rows has a step, and null in the user's columns.
        """
        table = self.row_table(chunk.rows(), chunk.positions(), chunk.per_slot(chunk.blocks[:, 5]), columns)
        if chunk.shared is None or "step" not in columns:
            return table
        steps = pl.Series(chunk.per_slot(chunk.blocks[:, 0]), dtype=pl.Int64)
        return table.with_columns(pl.col("step").fill_null(steps))

    def row_table(self, rows: Ints, position: Ints, positions: Ints, columns: list[str]) -> pl.DataFrame:
        """The same for any slots, given by their row, their position in it, and how many positions there are.

        A column per position gives each slot its own entry; null where the layer has another number of positions. All columns are
        null where there is no row (NO_ROW).
        """
        table = self._rows_or_nulls(rows, columns) if columns else pl.DataFrame()
        place = pl.Series("position", position, pl.Int64)
        for column in self.manifest.columns:
            if column.per == "position" and column.name in columns:
                fits = pl.col(column.name).list.len() == pl.lit(pl.Series(positions, dtype=pl.Int64))
                entry = pl.col(column.name).list.get(pl.lit(place), null_on_oob=True)
                table = table.with_columns(pl.when(fits).then(entry).alias(column.name))
        return pl.DataFrame([*table.get_columns(), place])

    def snapshot(self, step: int) -> TensorFile:
        """The weights, buffers and optimizer state after `step` updates."""
        return self.cached(("snapshot", step), lambda: self.open_snapshot(TensorFile, step))

    def totals(self) -> TensorFile:
        """The tensors of the totals; totals/fold.py says what they are."""
        return self.cached("totals", lambda: self.open_totals(TensorFile))

    def _table(self, place: int, name: str) -> pl.DataFrame:
        """A table of a chunk, up to the chunk's last step."""
        chunk = self.manifest.chunks[place]
        path = _path(place, name)
        table = self._read_table(path, chunk.files[name], lambda label: self._check_place(place, label))
        try:
            check_table(name, table, self.manifest, self._written[place], KINDS)
        except ValueError as error:
            raise StoreDamagedError(f"{address(self.files, path)} is damaged: {error}.") from None
        self._check_cut(place)
        return table.filter(pl.col("step") < chunk.end_step)


def _path(place: int, name: str) -> str:
    """A file of a chunk, by its path within the store."""
    return f"{chunk_name(place)}/{name}"
