"""Opens a store: reads and checks its manifest, then snapshots, totals and tables as they are asked for. Needs no PyTorch."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import replace
from threading import Lock
from typing import Any, TypeVar, cast

import polars as pl
from cachetools import LRUCache

from dualform.errors import (
    NotRecordedError,
    StoreChangedError,
    StoreDamagedError,
    StoreError,
    StoreMissingError,
    UnknownLayerError,
)
from dualform.forked import require_polars
from dualform.layers.layer import Layer
from dualform.store.consistency import check_manifest, table_limit
from dualform.store.files import CachedFiles, Files, address, read_fitting
from dualform.store.format import (
    SUMS,
    File,
    Manifest,
    Totals,
    checksum,
    groups_name,
    read_manifest,
    snapshot_name,
    totals_name,
)
from dualform.store.labels import LABEL, Label, Labels, require_equal, require_session, totals_about
from dualform.store.parquet import describe
from dualform.store.samples import SAMPLES, read_samples
from dualform.store.tables import group_types
from dualform.store.tensors import CheckedFile, read_label

OPENINGS = 5
"""A store that changes while it is being opened is opened again, at most this many times."""

CACHED_STEPS = 8
"""Results about this many steps of training are cached at a time: one may take tens of bytes per slot."""

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
F = TypeVar("F", bound=CheckedFile[Any])
FileKind = Callable[[Files, str, File], F]
"""A class of checked files: ArrayFile, or TensorFile."""
LabelCheck = Callable[[Label], object]
"""Raises ValueError unless a label is as expected."""


def cached_method(method: Method) -> Method:
    """Compute what a method of a store returns once for the same arguments, which are given by position."""

    @functools.wraps(method)
    def cached(store: Catalog, *arguments: Hashable) -> Any:
        key = (method.__name__, *arguments)
        return store.cached(key, lambda: method(store, *arguments))

    return cast(Method, cached)


class Catalog:
    """A recording on disk: its manifest, and files of the sizes that the manifest says."""

    def __init__(self, files: Files, manifest: Manifest | None = None):
        """manifest: another one than that on disk (a resumed run)."""
        self.files = files
        self.location = files.location
        self.is_elsewhere = isinstance(files, CachedFiles)
        """Whether the files are read through a cache, in which what is kept takes room."""
        self._cache: dict[Hashable, Any] = {}
        self._cache_by_step: LRUCache[int, dict[Hashable, Any]] = LRUCache(CACHED_STEPS)
        self._cache_lock = Lock()
        self._table_bytes: dict[str, int] = {}
        self._all_table_bytes = 0
        if manifest is not None:
            self._use(manifest)
            return
        for _ in range(OPENINGS - 1):
            try:
                self._use(read_manifest(self.files))
            except StoreChangedError:  # between reading the manifest and looking at its files
                continue
            return
        self._use(read_manifest(self.files))

    def _use(self, manifest: Manifest) -> None:
        """Take a manifest for that of the store, if it fits itself and the files."""
        self._manifest = _padded(manifest)
        self._labels = Labels(self.manifest)
        try:
            check_manifest(self.manifest)
        except ValueError as error:
            raise StoreDamagedError(f"the manifest of {self.location} is damaged: {error}.") from None
        if isinstance(self.files, CachedFiles):
            self.files.look_up([name for name, _ in self.manifest.files()])
        for name, file in self.manifest.files():
            with self._explaining(name):
                self._check_size(name, file)

    @property
    def manifest(self) -> Manifest:
        """What the store holds. Every question asks for it, so here is where a forked process is refused."""
        require_polars()
        return self._manifest

    def cached(self, key: Hashable, compute: Callable[[], T], end_step: int | None = None) -> T:
        """Return what `compute` returned the first time. end_step: the step that it is about; None: it holds for the whole store.

        Two threads may compute the same result at the same time; both are right, and one of them stays.
        """
        results = self._cache
        if end_step is not None:
            with self._cache_lock:
                results = self._cache_by_step.setdefault(end_step, {})
        if key not in results:
            results[key] = compute()
        return cast(T, results[key])

    @property
    def end_step(self) -> int:
        """How many steps are sealed."""
        return self.manifest.end_step

    @functools.cached_property
    def nbytes(self) -> int:
        """How much disk the store takes."""
        return sum(file.size for _, file in self.manifest.files())

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
        """After how many steps there are snapshots, ascending."""
        return list(self._snapshot_steps)

    @functools.cached_property
    def _snapshot_steps(self) -> list[int]:
        """The same, once the labels of all snapshots are known to fit the manifest: which ones there are decides how answers round."""
        for snapshot in self.manifest.snapshots:
            name = snapshot_name(snapshot.step)
            with self._explaining(name):
                label = read_label(self.files, name, snapshot.file)
                self._check_label(name, label, self._snapshot_check(snapshot.step))
        return sorted(snapshot.step for snapshot in self.manifest.snapshots)

    def _snapshot_check(self, step: int) -> LabelCheck:
        return functools.partial(require_session, sessions=self.manifest.sessions_at(step))

    def open_snapshot(self, kind: FileKind[F], step: int) -> F:
        """The weights, buffers and optimizer state after `step` updates, as a file of this kind."""
        for snapshot in self.manifest.snapshots:
            if snapshot.step == step:
                opened = self._open(kind, snapshot_name(step), snapshot.file, self._snapshot_check(step))
                break
        else:
            raise NotRecordedError(f"there is no snapshot at step {step}; there are: {self.snapshot_steps()}.")
        for parameter in self.manifest.parameters:
            name = f"model.{parameter.name}"
            if name in opened and opened.shape(name) != parameter.shape:
                raise StoreDamagedError(
                    f"{opened.path} is damaged: {name!r} is of shape {opened.shape(name)}, the manifest says {parameter.shape}."
                )
        return opened

    def open_totals(self, kind: FileKind[F]) -> F:
        """The tensors of the totals, as a file of this kind; totals/fold.py says what they are."""
        totals = self._totals()
        name = f"{totals_name(totals.number)}/{SUMS}"
        opened = self._open(kind, name, totals.files[SUMS], self._check_totals)
        try:
            for tensor in opened:
                self._check_total(tensor, opened.shape(tensor))
        except (ValueError, LookupError):
            raise StoreDamagedError(f"{opened.path} is damaged: {tensor!r} does not fit the manifest.") from None
        return opened

    def _check_totals(self, label: Label) -> None:
        """Raise ValueError unless a file of totals was written for those that the manifest names."""
        totals = self._totals()
        require_session(label, self.manifest.sessions_at(totals.step))
        require_equal(label, totals_about(totals))

    def _check_total(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless a tensor of the totals is of the right shape."""
        first, second, *rest = name.split(".")
        if first in ("initial", "now", "rounded", "negative"):
            return
        groups = self._totals().files[groups_name(int(first))].lines or 0
        if second.startswith("p"):
            lines = groups + ("rest" in rest)
            expected = self.manifest.parameters[int(second[1:])].shape
        else:
            lines = groups
            width = self.manifest.layers[int(second)].d_in
            expected = (width,) if rest == ["keys"] else ()
        if not shape or shape[0] > lines or shape[1:] != expected:
            raise ValueError

    @cached_method
    def groups(self, grouping: int) -> pl.DataFrame:
        """Return the groups of a grouping, in the order of their numbers."""
        totals = self._totals()
        name = f"{totals_name(totals.number)}/{groups_name(grouping)}"
        table = self._read_table(name, totals.files[groups_name(grouping)], self._check_totals)
        types = group_types(self.manifest.columns)
        if dict(table.schema) != {column: types[column] for column in totals.groupings[grouping].columns}:
            raise StoreDamagedError(
                f"{address(self.files, name)} is damaged: its columns are not those of the manifest."
            )
        return table

    def samples(self) -> pl.DataFrame | None:
        """Return the table of samples; None if the run has none."""
        with self._explaining(SAMPLES):
            return read_samples(self.files, self.manifest.run)

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
                f"{self.location} has no totals. Record with totals=[…], or build them: dualform totals RUN --by COLUMN."
            )
        return self.manifest.totals

    def _open(self, kind: FileKind[F], name: str, file: File, check: LabelCheck) -> F:
        """Open a file of tensors, by its name in the store. check: what to ask of its label."""
        with self._explaining(name):
            opened = kind(self.files, name, file)
            self._check_label(name, opened.label, check)
        return opened

    def _read_table(self, name: str, file: File, check: LabelCheck) -> pl.DataFrame:
        """Read a table, by its name in the store. check: what to ask of its label."""
        path = address(self.files, name)
        with self._explaining(name):
            data = read_fitting(
                self.files, name, lambda: self.files.read(name), lambda data: checksum(data) == file.checksum
            )
            if data is None:
                raise StoreDamagedError(f"{path} is damaged: its checksum does not fit the manifest.")
            self._check_table(name, data, file, check)
        try:
            return pl.read_parquet(io.BytesIO(data))
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise StoreDamagedError(f"{path} is damaged: Polars cannot read it ({error}).") from None

    def _check_table(self, name: str, data: bytes, file: File, check: LabelCheck) -> None:
        """Compare what a table says about itself with the manifest, before any of it is decoded."""
        path = address(self.files, name)
        try:
            described = describe(data)
        except ValueError as error:
            raise StoreDamagedError(f"{path} is damaged: {error}.") from None
        if described.lines != file.lines:
            raise StoreDamagedError(
                f"{path} is damaged: it has {described.lines:,} lines, the manifest says {file.lines:,}."
            )
        self._check_label(name, described.metadata.get(LABEL), check)
        most = table_limit(self.nbytes)
        if name not in self._table_bytes:
            self._table_bytes[name] = described.nbytes
            self._all_table_bytes += described.nbytes
        if self._all_table_bytes > most:
            raise StoreDamagedError(
                f"{path} is damaged: with the tables that were read before, it would take more than {most:,} bytes of memory."
            )

    def _check_label(self, name: str, text: str | None, check: LabelCheck) -> None:
        try:
            check(self._labels.read(text, name))
        except ValueError as error:
            raise StoreDamagedError(
                f"{address(self.files, name)} is not the file that the manifest names: {error}."
            ) from None

    def _check_size(self, name: str, file: File) -> None:
        size = self.files.size(name)
        if size != file.size:
            raise StoreDamagedError(
                f"{address(self.files, name)} is damaged: it has {size:,} bytes, the manifest says {file.size:,}."
            )

    @contextlib.contextmanager
    def _explaining(self, name: str) -> Iterator[None]:
        """Say why a file is not as the manifest says: has the recording changed since it was opened, or is the file damaged?"""
        try:
            yield
        except StoreError as error:
            raise self._explained(name, error) from error.__cause__

    def _explained(self, name: str, error: StoreError) -> StoreError:
        again = "Open it again."
        try:
            now = read_manifest(self.files)
        except StoreMissingError:
            return StoreChangedError(
                f"{self.location} has no manifest any more: the recording is being overwritten, or was removed, since it was opened."
            )
        except StoreError:
            return error
        if now.run != self.manifest.run:
            return StoreChangedError(
                f"another recording has replaced that in {self.location} since it was opened. {again}"
            )
        if _files_of(self.manifest, name) != _files_of(now, name):
            return StoreChangedError(
                f"the recording in {self.location} has changed since it was opened ({name} is another one now): it was resumed from an "
                f"earlier step, or its totals were built again. {again}"
            )
        return error


def _files_of(manifest: Manifest, name: str) -> list[File]:
    """Return what a manifest says of a file, or of the files in a folder."""
    return [file for known, file in manifest.files() if known == name or known.startswith(f"{name}/")]


def _padded(manifest: Manifest) -> Manifest:
    """Chunks from before a layer entered have none of its slots."""
    count = len(manifest.layers)
    chunks = (replace(chunk, slots=_pad(chunk.slots, count), keys=_pad(chunk.keys, count)) for chunk in manifest.chunks)
    return replace(manifest, chunks=tuple(chunks))


def _pad(counts: tuple[int, ...], length: int) -> tuple[int, ...]:
    return counts + (0,) * (length - len(counts))
