"""The files of a store that are no chunks, found by its manifest alone: for who reads them with or without PyTorch."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import polars as pl

from dualform.errors import NotRecordedError, StoreDamagedError, UnknownLayerError
from dualform.layers.streams import Layer
from dualform.store.format import (
    CHUNK_FILES,
    SUMS,
    File,
    Manifest,
    Totals,
    checksum,
    chunk_name,
    groups_name,
    load_manifest,
    snapshot_name,
    totals_name,
)


class Sealed:
    """A recording on disk: its manifest, and files of the sizes that the manifest says."""

    def __init__(self, folder: str | Path, manifest: Manifest | None = None):
        """manifest: another one than that on disk, for who knows what they do."""
        self.folder = Path(folder)
        self.manifest = _padded(load_manifest(self.folder) if manifest is None else manifest)
        self._group_tables: dict[int, pl.DataFrame] = {}
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

    @property
    def end_step(self) -> int:
        """How many steps are sealed."""
        return self.manifest.end_step

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

    def parameter(self, name: str) -> int:
        """The number of a recorded parameter."""
        for number, parameter in enumerate(self.manifest.parameters):
            if parameter.name == name:
                return number
        raise UnknownLayerError(f"parameter {name!r} was not recorded.")

    def snapshot_steps(self) -> list[int]:
        """After how many steps there are snapshots, ascending, as far as the slots are sealed."""
        return sorted(s.step for s in self.manifest.snapshots if s.step <= self.end_step)

    def snapshot_file(self, step: int) -> tuple[Path, File]:
        """Where the weights, buffers and optimizer state after `step` updates are."""
        for snapshot in self.manifest.snapshots:
            if snapshot.step == step:
                return self.folder / snapshot_name(step), snapshot.file
        raise NotRecordedError(f"there is no snapshot at step {step}; there are: {self.snapshot_steps()}.")

    def totals_file(self) -> tuple[Path, File]:
        """Where the totals are; totals/fold.py says what is in it."""
        totals = self._totals()
        return self.folder / totals_name(totals.number) / SUMS, totals.files[SUMS]

    def groups(self, grouping: int) -> pl.DataFrame:
        """The groups of a grouping, in the order of their numbers."""
        if grouping not in self._group_tables:
            totals, name = self._totals(), groups_name(grouping)
            path = self.folder / totals_name(totals.number) / name
            self._group_tables[grouping] = self._read_table(path, totals.files[name])
        return self._group_tables[grouping]

    def grouping(self, columns: Collection[str], step: int, *, deltas: bool, subset: bool = False) -> int | None:
        """The number of a grouping by just these columns (or, with subset, by more), of just this moment; None if there is none.

        deltas: one with group deltas, not with key sums.
        """
        totals = self.manifest.totals
        if totals is None or totals.step != step:
            return None
        for number, grouping in enumerate(totals.groupings):
            fits = set(columns) <= set(grouping.columns) if subset else set(columns) == set(grouping.columns)
            if fits and grouping.kind in ("both", "deltas" if deltas else "keys"):
                return number
        return None

    def _totals(self) -> Totals:
        if self.manifest.totals is None:
            raise NotRecordedError(
                f"{self.folder} has no totals. Record with totals=[…], or build them: dualform totals RUN --by COLUMN."
            )
        return self.manifest.totals

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
