"""Opens the files of chunks: slots and tables, once their labels, shapes and columns are known to fit the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import polars as pl

from dualform.arrays import Ints
from dualform.errors import StoreDamagedError
from dualform.recursions import KINDS
from dualform.store.catalog import Catalog
from dualform.store.consistency import check_table, check_tensors
from dualform.store.files import Files, address
from dualform.store.format import ROWS, SLOTS, Manifest, chunk_name
from dualform.store.labels import Label, chunk_about, require_chunk, require_session
from dualform.store.tensors import TensorFile


class ChunkFiles(Catalog):
    """A recording on disk, with the files of its chunks."""

    def __init__(self, files: Files, manifest: Manifest | None = None):
        """manifest: another one than that on disk (a resumed run)."""
        super().__init__(files, manifest)
        self._written: dict[int, Label] = {}
        """By chunk: what its files were written with, which may be more than what counts."""
        self._cut_chunks: set[int] = set()
        """Chunks that a resumed run has cut, whose counts are yet to be checked."""
        self._slot_files: dict[int, TensorFile] = {}

    def chunk_file(self, place: int) -> TensorFile:
        """Return the slots of a chunk."""
        if place in self._slot_files:
            return self._slot_files[place]
        file = self.manifest.chunks[place].files[SLOTS]
        opened = self._open(TensorFile, _path(place, SLOTS), file, lambda label: self._check_label_of(place, label))
        try:
            check_tensors(opened, self.manifest, self._written[place])
        except ValueError as error:
            raise StoreDamagedError(f"{opened.path} is damaged: {error}.") from None
        self._slot_files[place] = opened
        self._check_cut(place)
        return opened

    def chunk_table(self, place: int, name: str) -> pl.DataFrame:
        """Return a table of a chunk, up to the chunk's last step."""
        chunk = self.manifest.chunks[place]
        path = _path(place, name)
        table = self._read_table(path, chunk.files[name], lambda label: self._check_label_of(place, label))
        try:
            check_table(name, table, self.manifest, self._written[place], KINDS)
        except ValueError as error:
            raise StoreDamagedError(f"{address(self.files, path)} is damaged: {error}.") from None
        self._check_cut(place)
        return table.filter(pl.col("step") < chunk.end_step)

    @cached_property
    def first_slots(self) -> Ints:
        """(chunks, layers): how many slots of each layer come before each chunk."""
        return _counts_before([chunk.slots for chunk in self.manifest.chunks])

    @cached_property
    def first_keys(self) -> Ints:
        """(chunks, layers): how many keys of each layer come before each chunk."""
        return _counts_before([chunk.keys for chunk in self.manifest.chunks])

    def _check_label_of(self, place: int, label: Label) -> None:
        """Compare the label of a chunk's file with the manifest. Raises ValueError, which says what does not fit."""
        chunk = self.manifest.chunks[place]
        session = self.manifest.session_of(chunk.first_step)
        require_session(label, [session])
        about = chunk_about(chunk, self.first_slots[place].tolist(), self.first_keys[place].tolist())
        written = require_chunk(label, about)
        if place not in self._written:
            self._written[place] = written
            if written["end_step"] > chunk.end_step:
                self._cut_chunks.add(place)
        elif written != self._written[place]:
            raise ValueError("the files of its chunk were not written together")

    def _check_cut(self, place: int) -> None:
        """Count rows, slots and keys of a chunk that a resumed run has cut: its label says only how many there were before."""
        if place not in self._cut_chunks:
            return
        self._cut_chunks.discard(place)  # reading its files ends up here again
        chunk = self.manifest.chunks[place]
        counts = [self._cut_counts(place, number) for number in range(len(self.manifest.layers))]
        rows = self.chunk_table(place, ROWS).height
        expected = list(zip(chunk.slots, chunk.keys, strict=True))
        if rows != chunk.rows or counts != expected:
            raise StoreDamagedError(
                f"the manifest of {self.location} is damaged: chunk {place} has other counts up to step {chunk.end_step}."
            )

    def _cut_counts(self, place: int, number: int) -> tuple[int, int]:
        """Return how many slots and keys a layer has in a chunk, up to the chunk's last step."""
        file = self.chunk_file(place)
        if not any(name.startswith(f"{number}.") for name in file):
            return 0, 0
        end_step = self.manifest.chunks[place].end_step
        blocks = file[f"{number}.blocks"].numpy()
        blocks = blocks[blocks[:, 0] < end_step]
        rows = blocks[:, 4]
        positions = blocks[:, 5]
        slots = int((rows * positions).sum())
        if not slots:
            return 0, 0
        if f"{number}.key_numbers" in file:
            return slots, self._written[place]["keys"][number]
        keys_per_row = positions
        if self.manifest.layers[number].form == "maps":
            shapes = file[f"{number}.shapes"].numpy()
            keys_per_row = shapes[: len(blocks), 0]
        keys = rows * keys_per_row
        if f"{number}.sums" in file:  # the gradients of rows have no keys
            sums = file[f"{number}.sums"].numpy()
            holds_slots = sums[: len(blocks), 0] == 0
            keys = keys[holds_slots]
        return slots, int(keys.sum())


def _path(place: int, name: str) -> str:
    """Return a file of a chunk, by its path within the store."""
    return f"{chunk_name(place)}/{name}"


def _counts_before(counts: Sequence[Sequence[int]]) -> Ints:
    """Return the sums of the lines before each line."""
    table = np.array(counts, np.int64)
    before: Ints = table.cumsum(axis=0) - table
    return before
