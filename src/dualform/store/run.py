"""A run that several ranks have recorded, read as if one process had: nothing above the store knows how many there were.

A step of the run has the rows and slots of all ranks, in the order of the ranks. Updates, snapshots and logs are those of rank 0: after
DistributedDataParallel has averaged the gradients, all ranks make the same update. A backward pass `b` of rank `r` has the number
`b · ranks + r`.

Ranks seal their chunks on their own. A chunk of the run ends where chunks of all shards end; what a rank has sealed beyond the last step
that all ranks have sealed does not count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import polars as pl

from dualform.arrays import Ints
from dualform.errors import StoreDamagedError, StoreError
from dualform.native.picked import Picked
from dualform.store.catalog import FileKind, cached_method
from dualform.store.cut import manifest_until
from dualform.store.files import Files
from dualform.store.format import CHUNK_FILES, ROWS, STEPS, UPDATES, Chunk, File, Manifest, RowEvidence, checksum
from dualform.store.joined import JoinedTensor
from dualform.store.joined_chunks import JoinedChunk, KeyNumbers, Part, order_of
from dualform.store.labels import Label, Labels
from dualform.store.reader import Store
from dualform.store.shards import RANK, RANKS, RunFile, is_run, read_run, shard_files, shard_name
from dualform.store.tables import factor_table
from dualform.store.tensors import TensorFile

SAME = ("keep", "every", "dtype", "layers", "parameters", "columns", "base")
"""What the manifests of all shards must say alike."""


def open_store(files: Files) -> Store:
    """Open a recording, by one process or by several ranks."""
    if is_run(files):
        return Run(files)
    store = Store(files)
    settings = store.manifest.settings
    if RANKS in settings:
        raise StoreError(
            f"{files.location} holds what rank {settings[RANK]} of {settings[RANKS]} ranks has recorded, which alone explains no update. "
            f"Open the folder of the run, in which this folder is called {shard_name(int(settings[RANK]))}."
        )
    return store


class Run(Store):
    """The recording of several ranks, up to the last step that all of them have sealed."""

    def __init__(self, files: Files):
        self._run = read_run(files)
        self._shards = _open_shards(files, self._run)
        self.parts_of_chunks = _parts(self._shards)
        self.location = files.location
        super().__init__(files, self._manifest_of_run())
        for place, chunk in enumerate(self.manifest.chunks):
            self._written[place] = _label_of(chunk)

    @property
    def ranks(self) -> int:
        """How many ranks have recorded it."""
        return len(self._shards)

    def _manifest_of_run(self) -> Manifest:
        manifests = [shard.manifest for shard in self._shards]
        first = manifests[0]
        settings = {name: text for name, text in first.settings.items() if name != RANK}
        totals = self._run.totals
        chunks = tuple(_chunks(self.parts_of_chunks))
        end_step = chunks[-1].end_step if chunks else 0
        return replace(
            first,
            chunks=chunks,
            totals=totals if totals is not None and totals.step == end_step else None,
            ended=_ended([manifest.ended for manifest in manifests]),
            left_out=_left_out(manifests),
            inexact=_first_marks(manifests),
            rows=_evidence(manifests),
            settings=settings,
        )

    def _use(self, manifest: Manifest) -> None:
        """Take the manifest of the run: those of its shards were checked when these were opened."""
        self._manifest = manifest
        self._labels = Labels(manifest)

    @cached_property
    def nbytes(self) -> int:
        """How much disk the shards take."""
        return sum(shard.nbytes for shard in self._shards)

    # Chunks

    def chunk_file(self, place: int) -> TensorFile:
        """Return the slots of a chunk."""
        return self._joined_chunk(place)

    @cached_method
    def _joined_chunk(self, place: int) -> TensorFile:
        path = f"{self.location} (chunk {place} of all ranks)"
        chunk = JoinedChunk(path, self.parts_of_chunks[place], self.manifest.chunks[place].first_row, self._key_numbers)
        return cast(TensorFile, chunk)  # has the methods by which slots are read

    @cached_method
    def _key_numbers(self, layer: int) -> KeyNumbers:
        """Return how the run counts the keys of a layer."""
        if self.manifest.layers[layer].form != "vectors":
            return KeyNumbers(False, [])
        name = f"{layer}.key_numbers"
        if not any(name in shard.chunk_file(place) for shard in self._shards for place in shard._places):
            return KeyNumbers(False, [])
        first_keys = [np.zeros(len(shard.manifest.chunks), np.int64) for shard in self._shards]
        stored = 0
        for parts in self.parts_of_chunks:
            for part in parts:
                for place in part.places:
                    first_keys[part.rank][place] = stored
                    stored += part.store.manifest.chunks[place].keys[layer]
        return KeyNumbers(True, first_keys)

    @cached_method
    def picked(self, number: int, what: str) -> Picked:
        """Return all keys or error signals of a layer, for random access with few queries."""
        name = self.manifest.layers[number].name
        tables: list[Any] = []
        for _, vectors in self.stored(name, what):
            powers = vectors.exponents
            if not isinstance(vectors.data, JoinedTensor):
                tables.append((vectors.data, powers))
            elif powers is None:
                tables += [(piece, None) for piece in vectors.data.pieces]
            else:
                tables += zip(vectors.data.pieces, cast(JoinedTensor, powers).pieces, strict=True)
        return Picked(tables)

    # Snapshots and tables

    def snapshot_steps(self) -> list[int]:
        """After how many steps there are snapshots, ascending."""
        return self._shards[0].snapshot_steps()

    def open_snapshot(self, kind: FileKind[Any], step: int) -> Any:
        """The weights, buffers and optimizer state after `step` updates, as a file of this kind."""
        return self._shards[0].open_snapshot(kind, step)

    @cached_method
    def _fetch_tables(self, name: str) -> None:
        """Read a table of every chunk into the cache."""
        for shard in self._shards:
            shard._fetch_tables(name)

    def chunk_table(self, place: int, name: str) -> pl.DataFrame:
        """Return a table of a chunk."""
        parts = self.parts_of_chunks[place]
        tables = [_table_of(part, name) for part in parts]
        if name == ROWS:
            return _joined_rows(tables)
        if name == STEPS:
            return tables[0]
        return self._joined_updates(tables)

    def _joined_updates(self, tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
        """The updates of rank 0, with the factors of all ranks' backward passes."""
        first = tables[0]
        updated = first.select("step", "parameter")
        for rank, table in enumerate(tables):
            if not table.select("step", "parameter").equals(updated):
                raise StoreDamagedError(
                    f"{self.location} is damaged: rank {rank} has recorded other updates than rank 0. Each shard must be of the same run."
                )
        by_rank = [factor_table(table["factors"]) for table in tables]
        passes = max(factors.shape[1] for factors in by_rank)
        joined = np.zeros((first.height, passes, len(tables)))
        for rank, factors in enumerate(by_rank):
            joined[:, : factors.shape[1], rank] = factors
        lists = pl.Series("factors", joined.reshape(first.height, -1).tolist(), dtype=pl.List(pl.Float64()))
        return first.with_columns(lists)


def _open_shards(files: Files, run: RunFile) -> list[Store]:
    """Open all shards, each up to the last step that all of them have sealed."""
    shards = []
    for rank in range(run.ranks):
        shard = Store(shard_files(files, rank))
        settings = shard.manifest.settings
        is_named = (settings.get(RANK), settings.get(RANKS)) == (str(rank), str(run.ranks))
        if shard.manifest.run != run.run or not is_named:
            raise StoreDamagedError(
                f"{shard.location} is not what rank {rank} has recorded of the run in {files.location}. Restore the folder from a copy of "
                f"the run."
            )
        shards.append(shard)
    _refuse_others(files.location, [shard.manifest for shard in shards])
    end_step = min(shard.end_step for shard in shards)
    return [shard if shard.end_step == end_step else _until(shard, end_step) for shard in shards]


def _refuse_others(location: str, manifests: Sequence[Manifest]) -> None:
    """Refuse shards that are not of one training."""
    for field in SAME:
        # The columns of rows are not known before the first row
        known = [manifest for manifest in manifests if field != "columns" or manifest.columns]
        said = [getattr(manifest, field) for manifest in known]
        if any(found != said[0] for found in said):
            raise StoreDamagedError(
                f"{location}: the ranks have recorded different {field}. All ranks must train the same model, and name their rows with "
                f"the same columns."
            )


def _until(shard: Store, step: int) -> Store:
    """Return a shard as if it had ended at a step."""
    ended = shard.manifest.ended
    return Store(shard.files, replace(manifest_until(shard, step), ended=ended))


def _parts(shards: Sequence[Store]) -> list[list[Part]]:
    """Return the chunks of the run: what each shard has of them."""
    ends = [[chunk.end_step for chunk in shard.manifest.chunks] for shard in shards]
    common = set(ends[0]).intersection(*ends[1:])
    chunks = []
    begin = 0
    for end in sorted(common):
        parts = []
        for rank, shard in enumerate(shards):
            first = bisect_left(ends[rank], begin + 1)
            last = bisect_left(ends[rank], end)
            parts.append(Part(rank, shard, range(first, last + 1)))
        chunks.append(parts)
        begin = end
    return chunks


def _chunks(parts_of_chunks: Sequence[Sequence[Part]]) -> list[Chunk]:
    """Return what the manifest of the run says of its chunks."""
    chunks = []
    first_step = 0
    first_row = 0
    for parts in parts_of_chunks:
        own = [part.store.manifest.chunks[place] for part in parts for place in part.places]
        end_step = own[-1].end_step
        rows = sum(chunk.rows for chunk in own)
        slots = np.sum([chunk.slots for chunk in own], axis=0)
        keys = np.sum([chunk.keys for chunk in own], axis=0)
        files = {name: _joined_file([chunk.files[name] for chunk in own]) for name in CHUNK_FILES}
        chunks.append(Chunk(first_step, end_step, first_row, rows, tuple(slots.tolist()), tuple(keys.tolist()), files))
        first_step = end_step
        first_row += rows
    return chunks


def _joined_file(files: Sequence[File]) -> File:
    """Return what is known of some files together: which ones they are, and how much disk they take."""
    lines = [file.lines for file in files if file.lines is not None]
    together = checksum("".join(file.checksum for file in files).encode())
    return File(sum(file.size for file in files), together, sum(lines) if lines else None)


def _label_of(chunk: Chunk) -> Label:
    """Return what the label of a chunk's files would say, if they were written for the run."""
    return {
        "first_step": chunk.first_step,
        "end_step": chunk.end_step,
        "first_row": chunk.first_row,
        "rows": chunk.rows,
        "slots": list(chunk.slots),
        "keys": list(chunk.keys),
    }


def _table_of(part: Part, name: str) -> pl.DataFrame:
    """Return a table of what a shard has of a chunk."""
    read = part.store.rows_in if name == ROWS else part.store.updates_in
    if name == STEPS:
        return pl.concat([part.store.chunk_table(place, STEPS) for place in part.places], how="diagonal")
    assert name in (ROWS, UPDATES)
    return pl.concat([read(place) for place in part.places], how="diagonal")


def _joined_rows(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return the rows of all ranks in the order (step, rank)."""
    steps: list[Ints] = [table["step"].to_numpy() for table in tables]
    filled = [table for table in tables if table.height]
    joined = pl.concat(filled) if filled else tables[0]
    return joined[order_of(steps)]


def _ended(endings: Sequence[str | None]) -> str | None:
    """Return how a run has ended: None while a rank has not, or if it was killed."""
    if None in endings:
        return None
    others = [ended for ended in endings if ended not in (None, "closed")]
    return others[0] if others else endings[0]


def _left_out(manifests: Sequence[Manifest]) -> dict[str, str]:
    """Return what no rank has recorded: a layer that one rank never called may have been called on another."""
    first, *others = (manifest.left_out for manifest in manifests)
    return {name: why for name, why in first.items() if all(name in other for other in others)}


def _first_marks(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return from which step on a layer is inexact on some rank."""
    marks: dict[str, Any] = {}
    for manifest in manifests:
        for layer, mark in manifest.inexact.items():
            if layer not in marks or mark.step < marks[layer].step:
                marks[layer] = mark
    return marks


def _evidence(manifests: Sequence[Manifest]) -> dict[str, RowEvidence]:
    """Return how it is known which row a slot belongs to. What one rank has assumed is assumed for the run."""
    evidence: dict[str, RowEvidence] = {}
    for manifest in manifests:
        for layer, found in manifest.rows.items():
            if layer not in evidence or (found.assumed is not None and evidence[layer].assumed is None):
                evidence[layer] = found
    return evidence
