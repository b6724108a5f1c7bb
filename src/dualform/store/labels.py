"""Labels: the checksummed header of each file says which run the file belongs to, and where in it.

So a chunk that is duplicated, moved, missing or from another run is noticed when it is first used, whatever the manifest says.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dualform.store.format import Chunk, Manifest, Totals, checksum, compact_json, shortened

LABEL = "dualform"
"""The key of the label in a file's metadata."""
ALIASES = "dualform.aliases"
"""The key of the other names of tensors, in the same metadata."""
DIRECTORY = "dualform.directory"
"""The key of a checksum of all tensors' names, types and shapes, in the metadata of a safetensors file."""

Label = dict[str, Any]


class Labels:
    """Writes and reads the labels of one run. Only the run, sessions, keep, dtype, layers and parameters of the manifest are used."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest
        self._layouts: dict[tuple[int, int], str] = {}

    def write(self, name: str, about: Mapping[str, Any]) -> str:
        """Return the label of a file as text. name: its path within the store; about: its place in the run."""
        layers = len(self._manifest.layers)
        parameters = len(self._manifest.parameters)
        identity = {
            "run": self._manifest.run,
            "session": self._manifest.sessions[-1].name,
            "file": name,
            "layers": layers,
            "parameters": parameters,
            "layout": self._layout(layers, parameters),
        }
        return compact_json({**identity, **about})

    def read(self, text: str | None, name: str) -> Label:
        """Parse the label of a file. Raise ValueError unless it belongs to this run and has this name."""
        label = _parsed(text)
        if label.get("run") != self._manifest.run:
            raise ValueError("it belongs to another run")
        if label.get("file") != name:
            raise ValueError(f"it was written as {shortened(label.get('file'))}")
        layers = _count(label.get("layers"), len(self._manifest.layers))
        parameters = _count(label.get("parameters"), len(self._manifest.parameters))
        if label.get("layout") != self._layout(layers, parameters):
            raise ValueError("it was written for other layers or parameters than those of the manifest")
        return label

    def _layout(self, layers: int, parameters: int) -> str:
        """Return a checksum of everything that determines how slots are read, for this number of layers and parameters."""
        if (layers, parameters) not in self._layouts:
            manifest = self._manifest
            described = [
                manifest.keep,
                manifest.every,
                manifest.dtype,
                manifest.layers[:layers],
                manifest.parameters[:parameters],
            ]
            self._layouts[layers, parameters] = checksum(compact_json(described).encode())
        return self._layouts[layers, parameters]


def chunk_about(chunk: Chunk, first_slots: Sequence[int], first_keys: Sequence[int]) -> Label:
    """Return the place of a chunk: its steps and rows; by layer number, its slots and keys, and how many come before them."""
    return {
        "first_step": chunk.first_step,
        "end_step": chunk.end_step,
        "first_row": chunk.first_row,
        "rows": chunk.rows,
        "first_slots": list(first_slots),
        "slots": list(chunk.slots),
        "first_keys": list(first_keys),
        "keys": list(chunk.keys),
    }


def totals_about(totals: Totals) -> Label:
    """Return the step, rows and groupings of totals."""
    groupings = [{"columns": list(one.columns), "kind": one.kind} for one in totals.groupings]
    return {"step": totals.step, "rows": totals.rows, "groupings": groupings}


def require_session(label: Label, sessions: Collection[str | None]) -> None:
    """Raise ValueError unless a file was written in one of these sessions."""
    if label.get("session") not in sessions:
        raise ValueError("it is of steps that were dropped when the run was resumed")


def require_equal(label: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raise ValueError unless the label says the same."""
    for field, value in about.items():
        if label.get(field) != value:
            raise ValueError(_difference(field, label.get(field), value))


def require_chunk(label: Label, about: Label) -> Label:
    """Return the counts that a chunk's file was written with. Raise ValueError unless they fit the chunk in the manifest.

    A run that resumes in the middle of a chunk shortens it: in the manifest it then ends earlier than in its files, with fewer of everything.
    """
    written = {field: _padded(label.get(field), about[field]) for field in about}
    for field in ("first_step", "first_row", "first_slots", "first_keys"):
        require_equal(written, {field: about[field]})
    if written["end_step"] == about["end_step"]:
        require_equal(written, about)
        return written
    for field in ("end_step", "rows"):
        _require_most(field, written[field], about[field])
    for field in ("slots", "keys"):
        if not isinstance(written[field], list) or len(written[field]) != len(about[field]):
            raise ValueError(_difference(field, written[field], about[field]))
        for most, value in zip(written[field], about[field], strict=True):
            _require_most(field, most, value)
    return written


def _require_most(field: str, most: object, value: int) -> None:
    if not isinstance(most, int) or most < value:
        raise ValueError(_difference(field, most, value))


def _padded(written: Any, expected: Any) -> Any:
    """Return counts by layer, with zeros for layers that were added later."""
    if isinstance(written, list) and isinstance(expected, list):
        return written + [0] * (len(expected) - len(written))
    return written


def _parsed(text: str | None) -> Label:
    label = None
    if text is not None:
        try:
            label = json.loads(text)
        except (ValueError, RecursionError):
            label = None
    if not isinstance(label, dict):
        raise ValueError("its header does not say which run it belongs to")
    return label


def _count(value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError("it was written for more layers or parameters than the manifest has")
    return value


def _difference(field: str, written: object, said: object) -> str:
    return f"it was written with {field} = {shortened(written)}, the manifest says {shortened(said)}"
