"""The reader: opens a store by its manifest alone, maps chunks into memory, checks every file at its first touch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.arrays import Ints
from dualform.errors import StoreDamagedError
from dualform.layers.layer import Layer
from dualform.native.picked import Picked
from dualform.store import tables
from dualform.store.catalog import cached_method
from dualform.store.chunk_files import ChunkFiles
from dualform.store.encoding import Encoded, decode
from dualform.store.files import CachedFiles, Files
from dualform.store.format import ROWS, SLOTS, STEPS, SUMMED, UPDATES, Manifest, chunk_name
from dualform.store.memory import give_back
from dualform.store.slots import SlotChunk, stored_vectors
from dualform.store.tables import row_series, row_types
from dualform.store.tensors import TensorFile

STRETCH = 512
"""This many vectors are decoded at a time, so that they stay in the cache."""
READ_BYTES = 256 << 20
"""When chunks of this size together have been read, the memory that they were decoded into is given back."""


class Store(ChunkFiles):
    """A recording on disk, as far as it is sealed. Threads may share it: what they find out twice is the same."""

    def __init__(self, files: Files, manifest: Manifest | None = None):
        """manifest: another one than that on disk (a resumed run)."""
        super().__init__(files, manifest)
        self._decoded_bytes = 0

    @property
    def _places(self) -> range:
        """The places of all chunks."""
        return range(len(self.manifest.chunks))

    # Layers and parameters

    def users(self, parameter: str) -> list[Layer]:
        """Return the layers whose slots make up a parameter."""
        return [layer for layer in self.manifest.layers if parameter in layer.parameters]

    def is_vector(self, parameter: str) -> bool:
        """Whether a parameter is a bias or an elementwise weight: its gradients are kept themselves."""
        return self.manifest.is_vector(parameter)

    def slots(self, name: str) -> int:
        """Return how many slots a layer has."""
        number, _ = self.layer(name)
        return sum(self._counts(number, "error"))

    def key_count(self, name: str) -> int:
        """Return how many keys a layer has in store: fewer than slots, where equal keys are stored once."""
        number, _ = self.layer(name)
        return sum(self._counts(number, "key"))

    def _counts(self, number: int, what: str) -> list[int]:
        """Return how many keys or error signals (as many as slots) of a layer each chunk has."""
        if what == "key":
            return [chunk.keys[number] for chunk in self.manifest.chunks]
        return [chunk.slots[number] for chunk in self.manifest.chunks]

    @cached_method
    def is_summed(self, name: str) -> bool:
        """Whether slots of a layer were summed row by row when they were recorded: then single positions are lost."""
        _, layer = self.layer(name)
        if layer.keep not in SUMMED:
            return False
        return any(chunk.is_summed for chunk in self.addresses(name))

    def has_no_positions(self, name: str) -> bool:
        """Whether a layer's single keys and error signals are lost: its rows were summed, or projected."""
        _, layer = self.layer(name)
        return layer.projected_from is not None or self.is_summed(name)

    def why_no_positions(self, name: str) -> str:
        """Return why a layer has no single positions, and what to do."""
        _, layer = self.layer(name)
        if layer.projected_from is not None:
            return (
                f'layer {name!r} keeps random projections of its slots (keep="projected" in {self.location}), so single keys, error signals '
                f'and attention weights are not known. Ask contributions() or influence() by row, or record with keep="slots".'
            )
        return (
            f'layer {name!r} keeps what each row adds up to over its positions (keep="rows" in {self.location}), so single positions, '
            f'their keys and attention weights are not known. Ask contributions() or influence() by row, or record with keep="slots".'
        )

    @cached_method
    def has_equal_keys(self, name: str) -> bool:
        """Whether slots share stored keys; else the key of a slot has the slot's own number."""
        number, layer = self.layer(name)
        if layer.form != "vectors":
            return False
        if self.is_summed(name):
            return any(chunk.key_numbers is not None for chunk in self.addresses(name))
        if self._counts(number, "key") != self._counts(number, "error"):
            return True
        # As many need not be the same: a chunk that was cut (a resumed run) has all its keys, and only some of its slots
        for chunk in self.addresses(name):
            own = np.arange(chunk.first_slot, chunk.first_slot + chunk.slots)
            if chunk.key_numbers is not None and not np.array_equal(chunk.key_numbers, own):
                return True
        return False

    # Slots, chunk by chunk

    def chunks(self, name: str, *, begin_step: int = 0, end_step: int | None = None) -> Iterator[SlotChunk]:
        """Yield a layer's slots, chunk by chunk in the order of their numbers.

        Chunks that end before begin_step are passed over; slots from end_step on are cut off.
        """
        for chunk in self.addresses(name, begin_step=begin_step, end_step=end_step):
            yield chunk
            self.decoded(chunk.chunk.files[SLOTS].size)

    def addresses(self, name: str, *, begin_step: int = 0, end_step: int | None = None) -> Iterator[SlotChunk]:
        """Yield the same, for callers that read no keys and error signals."""
        chunks = self.cached(("addresses", name), lambda: self._addresses(name, end_step), end_step)
        for chunk in chunks:
            if chunk.chunk.end_step > begin_step:
                yield chunk

    def _addresses(self, name: str, end_step: int | None) -> list[SlotChunk]:
        chunks = []
        for place, chunk in enumerate(self.manifest.chunks):
            if end_step is not None and chunk.first_step >= end_step:
                break
            slots = self.chunk_of(name, place, end_step)
            if slots is not None:
                chunks.append(slots)
        return chunks

    def chunk_of(self, name: str, place: int, end_step: int | None = None) -> SlotChunk | None:
        """Return a layer's slots in one chunk; None if it has none there."""
        number, layer = self.layer(name)
        chunk = self.manifest.chunks[place]
        if not chunk.slots[number]:
            return None
        return SlotChunk(
            store=self,
            file=self.chunk_file(place),
            number=number,
            layer=layer,
            chunk_number=place,
            first_slot=int(self.first_slots[place, number]),
            end_key=int(self.first_keys[place, number]) + chunk.keys[number],
            chunk=chunk,
            written=self._written[place],
            end_step=end_step,
        )

    def decoded(self, nbytes: int) -> None:
        """Note that this many bytes of a chunk have been decoded and released; frees memory now and then."""
        self._decoded_bytes += nbytes
        if self._decoded_bytes >= READ_BYTES:
            give_back()
            self._decoded_bytes = 0

    # Vectors as they are stored

    def stored(self, name: str, what: str) -> Iterator[tuple[int, Encoded]]:
        """Yield the keys or error signals of a layer as they are stored, chunk by chunk: (number of the first, vectors).

        what: "key" or "error".
        """
        number, _ = self.layer(name)
        first = 0
        for place, count in enumerate(self._counts(number, what)):
            if count:
                vectors = self._encoded(place, number, what)
                yield first, vectors.first_vectors(count)
            first += count

    def passing(self, name: str, what: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield the stored vectors of a layer, decoded, some at a time: (number of the first, vectors)."""
        for first, vectors in self.stored(name, what):
            for low in range(0, vectors.count, STRETCH):
                here = slice(low, low + STRETCH)
                stretch = decode(vectors.data[here], vectors.scales(here), dtype)
                yield first + low, stretch

    def gather(self, number: int, what: str, wanted: Ints, dtype: torch.dtype) -> Tensor:
        """Return keys by their numbers, or error signals by those of their slots, from whichever chunk holds them, (n, d)."""
        counts = self._counts(number, what)
        ends = np.cumsum(counts)
        count = sum(counts)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= count):
            raise StoreDamagedError(f"{self.location} is damaged: a slot names a key that is not there.")
        layer = self.manifest.layers[number]
        width = layer.d_in if what == "key" else len(layer.outputs) or layer.d_out
        gathered = torch.empty(len(wanted), width, dtype=dtype)
        home = np.searchsorted(ends, wanted, side="right")
        for place in np.unique(home).tolist():
            here = np.flatnonzero(home == place)
            first = ends[place] - counts[place]
            rows = torch.from_numpy(wanted[here] - first)
            encoded = self._encoded(place, number, what)
            gathered[torch.from_numpy(here)] = encoded.some(rows, dtype)
        return gathered

    @cached_method
    def can_pick(self, number: int, what: str) -> bool:
        """Whether all keys or error signals of a layer may stay mapped: of a store elsewhere, they take room in its cache."""
        return not isinstance(self.files, CachedFiles) or self._vector_bytes(number, what) <= self.files.most_mapped

    def _vector_bytes(self, number: int, what: str) -> int:
        layer = self.manifest.layers[number]
        width = layer.d_in if what == "key" else layer.d_out
        return 8 * width * sum(self._counts(number, what))  # 8: of the longest type

    @cached_method
    def picked(self, number: int, what: str) -> Picked:
        """Return all keys or error signals of a layer, for random access with few queries."""
        name = self.manifest.layers[number].name
        return Picked([(vectors.data, vectors.exponents) for _, vectors in self.stored(name, what)])

    def _encoded(self, place: int, number: int, what: str) -> Encoded:
        """Return a layer's vectors in one chunk."""
        if self.is_elsewhere:  # those that are kept stay mapped
            return stored_vectors(self.chunk_file(place), number, what)
        return self._kept_encoded(place, number, what)

    @cached_method
    def _kept_encoded(self, place: int, number: int, what: str) -> Encoded:
        return stored_vectors(self.chunk_file(place), number, what)

    def gradients(self, parameter: str) -> Tensor | None:
        """Return the kept gradients of a parameter, (updates, *shape) in the order of its updates; None: not kept."""
        by_chunk = [self.gradients_in(place, parameter) for place in self._places]
        kept = [gradients for gradients in by_chunk if gradients is not None]
        return torch.cat(kept) if kept else None

    def gradients_in(self, place: int, parameter: str) -> Tensor | None:
        """Return the kept gradients of a parameter in one chunk."""
        number = self.parameter(parameter)
        file = self.chunk_file(place)
        name = f"gradient.{number}"
        kept = self._gradient_counts(place).get(number, 0)
        stored = file.shape(name)[0] if name in file else 0
        if kept > stored:
            raise StoreDamagedError(
                f"{file.path} is damaged: it has {stored} gradients of {parameter!r}, the updates of its chunk say {kept}."
            )
        return file[name][:kept] if name in file else None

    @cached_method
    def _gradient_counts(self, place: int) -> dict[int, int]:
        """Return how many gradients of each parameter, by its number, the updates of a chunk say are kept."""
        kept = self.updates_in(place).filter(pl.col("gradient_kept"))
        return dict(kept.group_by("parameter").len().iter_rows())

    @cached_method
    def snapshot(self, step: int) -> TensorFile:
        """Return the weights, buffers and optimizer state after `step` updates."""
        return self.open_snapshot(TensorFile, step)

    @cached_method
    def totals(self) -> TensorFile:
        """Return the tensors of the totals; totals/fold.py says what they are."""
        return self.open_totals(TensorFile)

    # Tables

    @cached_property
    def rows(self) -> pl.DataFrame:
        """The row table: `step` and the user's columns; a row's number is its place."""
        empty = pl.DataFrame(schema=row_types(self.manifest.columns))
        self._fetch_tables(ROWS)
        by_chunk = [self.rows_in(place) for place in self._places]
        return pl.concat([empty, *by_chunk], rechunk=True)

    def rows_in(self, place: int) -> pl.DataFrame:
        """Return the rows of one chunk."""
        table = self.chunk_table(place, ROWS)
        if not table.height:  # columns are not known before the first row
            return pl.DataFrame(schema=row_types(self.manifest.columns))
        return table

    @cached_property
    def updates(self) -> pl.DataFrame:
        """One line for each (step, parameter): the optimizer's settings, factors and the audit's residual."""
        self._fetch_tables(UPDATES)
        by_chunk = [self.updates_in(place) for place in self._places]
        return pl.concat([tables.updates_table([]), *by_chunk], how="diagonal")

    @cached_method
    def updates_in(self, place: int) -> pl.DataFrame:
        """Return the updates of one chunk."""
        return self.chunk_table(place, UPDATES)

    @cached_property
    def log(self) -> pl.DataFrame:
        """One line for each step, with what recorder.log() was given."""
        self._fetch_tables(STEPS)
        by_chunk = [self.chunk_table(place, STEPS) for place in self._places]
        return pl.concat([tables.steps_table([]), *by_chunk], how="diagonal")

    def _fetch_tables(self, name: str) -> None:
        """Read a table of every chunk into the cache, several at a time: one after the other, each would wait for the network."""
        if isinstance(self.files, CachedFiles):
            self.files.fetch([f"{chunk_name(place)}/{name}" for place in self._places])

    def slot_table(self, chunk: SlotChunk, columns: list[str]) -> pl.DataFrame:
        """Return one line for each slot of a chunk: these columns of its row, and its `position`.

        A slot that serves all rows has a step, and null in the user's columns.
        """
        positions_of_row = chunk.per_slot(chunk.blocks[:, 5])
        table = self.row_table(chunk.rows(), chunk.positions(), positions_of_row, columns)
        if chunk.shared is None or "step" not in columns:
            return table
        steps = pl.Series(chunk.per_slot(chunk.blocks[:, 0]), dtype=pl.Int64)
        return table.with_columns(pl.col("step").fill_null(steps))

    def row_table(self, rows: Ints, position: Ints, positions: Ints, columns: list[str]) -> pl.DataFrame:
        """Return the same for any slots, given by their row, their position in it, and how many positions there are.

        A column per position gives each slot its own entry; null where the layer has another number of positions. All columns are
        null where there is no row (NO_ROW).
        """
        table = self._rows_or_nulls(rows, columns) if columns else pl.DataFrame()
        place = pl.Series("position", position, pl.Int64)
        length = pl.lit(pl.Series(positions, dtype=pl.Int64))
        for column in self.manifest.columns:
            if column.per == "position" and column.name in columns:
                entries = pl.col(column.name).list
                entry = entries.get(pl.lit(place), null_on_oob=True)
                fitting = pl.when(entries.len() == length).then(entry)
                table = table.with_columns(fitting.alias(column.name))
        return pl.DataFrame([*table.get_columns(), place])

    def _rows_or_nulls(self, rows: Ints, columns: list[str]) -> pl.DataFrame:
        """Return rows by their numbers; a line of nulls for NO_ROW."""
        numbers = row_series(rows)
        if numbers.null_count():
            return self.rows.select(pl.col(columns).gather(numbers))
        # Column by column: a whole table's would be taken by Polars' threads, which wait for PyTorch's to sleep
        return pl.DataFrame([self.rows[name][rows] for name in columns])
