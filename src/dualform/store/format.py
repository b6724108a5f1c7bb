"""The names and the manifest of a store. The whole format is in docs/store-format.md.

No name in a manifest is ever used as a path: folders and files are named by number, here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash

from dualform.errors import StoreDamagedError, StoreError, StoreMissingError, StoreVersionError
from dualform.layers.layer import Count, Layer
from dualform.store.files import Files, address

VERSION = 6
MANIFEST = "manifest.json"
LOCK = "writer.lock"
SLOTS, ROWS, UPDATES, STEPS = "slots.safetensors", "rows.parquet", "updates.parquet", "steps.parquet"
SUMS = "totals.safetensors"
TABLES = (ROWS, UPDATES, STEPS)
CHUNK_FILES = (SLOTS, *TABLES)

KEEPS = ("slots", "rows", "projected", "keys", "totals")
SUMMED = ("rows", "projected")
"""Those that sum the slots of a row where that takes less."""
MIXED = "mixed"
"""What a manifest says if it is not the same for all layers."""
TOTAL_KINDS = ("keys", "deltas", "both")
"""What totals keep of each group: the sum of its keys, its part of the weights, or both."""
DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "int16", "float64": "float64"}
"""What users may say in dtype=, and as which NumPy type such vectors are stored: NumPy has no bfloat16, so its bits are."""
MOST_MANIFEST = 256 << 20
"""The size of a manifest, at most: a chunk takes less than a kilobyte, and a few bytes more for each layer."""
BLOCK_FIELDS = ("step", "backward", "call", "first_row", "rows", "positions", "arrival")
SUM_FIELDS = ("is_gradient", "positions", "written")
"""What is known of a block whose slots were summed row by row: whether it holds gradients, how many slots each row had, and how many
of all slots had an error signal that is not zero."""
NO_ROW = -1
"""The first_row of a block that serves all rows at once (position ids of shape (1, T)): its slots, `positions` of them, have no row."""
SHARED = "shared"
"""What such slots are called where people read of them; in tables, their row and the user's columns are null."""


INITIAL = "initial weights"
"""What the weights were when recording began, unless the user says otherwise ("pretrained")."""


@dataclass(frozen=True)
class Parameter:
    """One recorded parameter: its place in the list is its number in chunks and in updates."""

    name: str
    shape: tuple[Count, ...]
    dtype: str


@dataclass(frozen=True)
class Column:
    """One column of the rows: a Polars type by name, per row or per (row, position)."""

    name: str
    type: str
    per: str


@dataclass(frozen=True)
class File:
    """What a file must look like: its size, and the checksum of its bytes (of its header, for safetensors)."""

    size: Count
    checksum: str
    lines: Count | None = None
    """How many lines a table has; None for tensors."""


@dataclass(frozen=True)
class Chunk:
    """A sealed chunk: steps first_step ≤ step < end_step, rows from first_row on; what its files hold beyond does
    not count. By layer number: slots, and keys (fewer, where equal keys are stored once)."""

    first_step: Count
    end_step: Count
    first_row: Count
    rows: Count
    slots: tuple[Count, ...]
    keys: tuple[Count, ...]
    files: dict[str, File]
    shard: Count = 0

    @functools.cached_property
    def text(self) -> str:
        """As it stands in the manifest: made once, though every new chunk makes a new manifest."""
        return compact_json(self)


@dataclass(frozen=True)
class Snapshot:
    """All weights, buffers and optimizer state after `step` updates."""

    step: Count
    file: File


@dataclass(frozen=True)
class Session:
    """One call of record(): a random name, and the step that it began with. Files of steps that were dropped when a run was resumed
    have the name of an earlier session than those that replace them."""

    name: str
    first_step: Count


@dataclass(frozen=True)
class Grouping:
    """Totals kept for the groups that some columns make: "keys" (sums of keys), "deltas" (parts of the weights), both."""

    columns: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Totals:
    """All totals, as they were after `step` updates: a folder with one table of groups for each grouping.

    A named file is never written again, so each version has a folder of its own, by number.
    """

    number: Count
    step: Count
    rows: Count
    groupings: tuple[Grouping, ...]
    files: dict[str, File]


@dataclass(frozen=True)
class Mark:
    """From this step on a layer's slots do not explain it."""

    step: Count
    why: str


@dataclass(frozen=True)
class RowEvidence:
    """Where a layer's input holds the rows, and how that is known: shown by an experiment at a step, or assumed from a step on."""

    where: str = ""
    proved: Count | None = None
    assumed: Count | None = None
    why: str = ""
    """Why it is assumed, if it is."""

    def __str__(self) -> str:
        said = []
        if self.proved is not None:
            said.append(f"proved at step {self.proved}")
        if self.assumed is not None:
            said.append(f"assumed from step {self.assumed} on, because {self.why}")
        return f"{'; '.join(said)} ({self.where})"


@dataclass(frozen=True)
class Manifest:
    """Everything about a store but its numbers."""

    version: Count
    created_by: str
    keep: str
    dtype: str
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]
    left_out: dict[str, str]
    batch_axis: dict[str, Count]
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    """A random name of the run, which all its files have in their headers. A resumed run keeps it."""
    sessions: tuple[Session, ...] = ()
    columns: tuple[Column, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    totals: Totals | None = None
    ended: str | None = None
    inexact: dict[str, Mark] = field(default_factory=dict)
    rows: dict[str, RowEvidence] = field(default_factory=dict)
    """By layer: how it is known which row a slot belongs to."""
    settings: dict[str, str] = field(default_factory=dict)
    every: Count = 1
    """n: the slots of one step in n are kept."""
    base: dict[str, str] = field(default_factory=dict)
    """Checksums of the frozen weights that are not stored, by name: those under adapters, and quantised ones."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether every gradient can be put together again from what is kept of its slots."""
        return self.keep != "totals" and self.every == 1 and all(layer.explains_gradients for layer in self.layers)

    def keeps_step(self, step: int) -> bool:
        """Whether the slots of a step are kept: of every so many steps one, drawn at random, for epochs may be as long."""
        window, place = divmod(step, self.every)
        return place == xxhash.xxh32_intdigest(f"{self.run} {window}".encode()) % self.every

    @property
    def end_step(self) -> int:
        """How many steps are sealed."""
        if self.keep == "totals":
            return self.totals.step if self.totals else 0
        return self.chunks[-1].end_step if self.chunks else 0

    @property
    def initial(self) -> str:
        """What the weights were when recording began, in the user's words."""
        return self.settings.get("initial", INITIAL)

    def is_vector(self, parameter: str) -> bool:
        """Whether a parameter is a bias or an elementwise weight: its gradients are kept themselves."""
        return any(parameter in layer.vectors() for layer in self.layers)

    def with_session(self) -> Manifest:
        """The manifest of a new session, which goes on after the last sealed step."""
        # One that began at this very step may have written the snapshot of it, which stays
        kept = [session for session in self.sessions if session.first_step <= self.end_step]
        return dataclasses.replace(self, sessions=(*kept, Session(secrets.token_hex(8), self.end_step)))

    def session_of(self, step: int) -> str | None:
        """The session that recorded a step."""
        names = [session.name for session in self.sessions if session.first_step <= step]
        return names[-1] if names else None

    def sessions_at(self, step: int) -> set[str]:
        """The sessions that may have written down how things were after `step` updates: the one that recorded the last of them, and
        those that began there."""
        began = {session.name for session in self.sessions if session.first_step == step}
        before = self.session_of(step - 1)
        return began if before is None else began | {before}

    def files(self) -> Iterator[tuple[str, File]]:
        """All files that it names: the path of each within the store, and what the file must look like."""
        for number, chunk in enumerate(self.chunks):
            for name, file in chunk.files.items():
                yield f"{chunk_name(number)}/{name}", file
        for snapshot in self.snapshots:
            yield snapshot_name(snapshot.step), snapshot.file
        if self.totals is not None:
            yield from totals_files(self.totals)

    def dump(self) -> bytes:
        """Return the manifest as JSON, with a checksum over everything else in it; chunks at the end, a line each.

        `steps` says how many steps are sealed, so that a chunk that is missing at the end is noticed.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "chunks"}
        head = msgspec.to_builtins({"format": "dualform", **fields, "steps": self.end_step})
        # The digest of the whole, put together from the texts of its parts: those of chunks are known
        texts = {name: compact_json(value) for name, value in head.items()}
        texts["chunks"] = f"[{','.join(chunk.text for chunk in self.chunks)}]"
        whole = ",".join(f'"{name}":{texts[name]}' for name in sorted(texts))
        head["checksum"] = checksum(f"{{{whole}}}".encode())
        head_text = msgspec.json.format(msgspec.json.encode(head), indent=1).decode().removesuffix("\n}")
        lines = ",\n".join(f"  {chunk.text}" for chunk in self.chunks)
        return f'{head_text},\n "chunks": [\n{lines}\n ]\n}}\n'.encode()


def chunk_name(number: int) -> str:
    """The folder of a chunk."""
    return f"chunk-{number:06d}"


def snapshot_name(step: int) -> str:
    """The file of a snapshot."""
    return f"snapshot-{step:09d}.safetensors"


def totals_name(number: int) -> str:
    """The folder of a version of the totals."""
    return f"totals-{number:06d}"


def totals_files(totals: Totals) -> Iterator[tuple[str, File]]:
    """The files of some totals: the path of each within the store, and what the file must look like."""
    for name, file in totals.files.items():
        yield f"{totals_name(totals.number)}/{name}", file


def groups_name(number: int) -> str:
    """The table of a grouping's groups, within the folder of the totals."""
    return f"groups-{number:03d}.parquet"


def checksum(data: bytes | memoryview | np.ndarray[Any, Any]) -> str:
    """A fast checksum against accidents (not against forgery: nothing in a store can run code anyway)."""
    return xxhash.xxh3_64_hexdigest(data)  # type: ignore[arg-type]


def shortened(value: object) -> str:
    """Return a value as text for a message, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def size_text(nbytes: float) -> str:
    """Return a number of bytes as people read it, such as 2.5 MB."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def read_manifest(files: Files) -> Manifest:
    """Read and check the manifest of a store."""
    path = address(files, MANIFEST)
    text = _manifest_text(files)
    try:
        data = msgspec.json.decode(text)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:  # older versions of msgspec raise no ValueError
        raise StoreDamagedError(
            f"{path} is damaged: it is no JSON, or holds what is no text that can be printed ({error})."
        ) from None
    if not isinstance(data, dict) or data.get("format") != "dualform":
        raise StoreDamagedError(f'{path} is no dualform manifest (its "format" is not "dualform").')
    _check_version(files.location, data.get("version"))
    said = data.pop("checksum", None)
    if said != _digest(data):
        raise StoreDamagedError(f"{path} is damaged: its checksum does not fit its content.")
    del data["format"]
    steps = data.pop("steps", None)
    try:
        manifest = _typed_manifest(data)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreDamagedError(f"{path} is damaged: {error}.") from None
    if steps != manifest.end_step or isinstance(steps, bool):
        raise StoreDamagedError(
            f"{path} is damaged: it says that {steps!r} steps are sealed, but its chunks hold {manifest.end_step}."
        )
    return manifest


def _typed_manifest(data: dict[str, Any]) -> Manifest:
    """Return the manifest that JSON describes. Raises ValueError, which says what is not as expected."""
    known = {field.name for field in dataclasses.fields(Manifest)}
    if data.keys() != known:
        missing = ", ".join(sorted(known - data.keys())) or "nothing"
        unknown = ", ".join(sorted(map(repr, data.keys() - known)))[:200] or "nothing"
        raise ValueError(f"Manifest is not as expected (missing: {missing}; unknown: {unknown})")
    manifest = msgspec.convert(data, Manifest)
    # What is missing inside would get its default, and what is unknown would be left out
    if compact_json(manifest) != compact_json(data):
        raise ValueError("Manifest is not as expected (some of its parts have missing or unknown fields)")
    return manifest


def _manifest_text(files: Files) -> bytes:
    location = files.location
    try:
        text = files.read_range(MANIFEST, 0, MOST_MANIFEST + 1)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise StoreMissingError(
                f"{location} holds no recording: there is no such folder, or it has no {MANIFEST}. Expected the folder that was given to "
                f"dualform.record()."
            ) from None
        if isinstance(error.__cause__, NotADirectoryError):
            raise StoreMissingError(
                f"{location} holds no recording: expected a folder with a file {MANIFEST}."
            ) from None
        raise
    if len(text) > MOST_MANIFEST:
        raise StoreDamagedError(
            f"{address(files, MANIFEST)} is no dualform manifest: it has more than {MOST_MANIFEST:,} bytes."
        )
    return text


def _check_version(location: str, version: object) -> None:
    if not isinstance(version, int) or version == VERSION:
        return  # what is no number fails with the other fields
    if version > VERSION:
        raise StoreVersionError(
            f"{location} was written in format {version}; this version of dualform reads up to {VERSION}. "
            f"Upgrade: pip install -U dualform."
        )
    raise StoreVersionError(
        f"{location} was written in format {version} by an earlier version of dualform; this version reads only format "
        f"{VERSION}. Record the training again."
    )


def _digest(content: dict[str, Any]) -> str:
    return checksum(compact_json(content).encode())


def compact_json(content: Any) -> str:
    """Return JSON in one line, always the same for the same content, dataclasses included."""
    return json.dumps(msgspec.to_builtins(content), sort_keys=True, separators=(",", ":"))
