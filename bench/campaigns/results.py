"""Counts of a campaign, kept by the version of the code that it tested, so that several runs add up."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dualform
from dualform.version import __version__

FOLDER = Path(__file__).parents[1] / "results"
PACKAGE = Path(dualform.__file__).parent

STORE_AND_RECORDER = ("store", "record", "totals", "native")
"""The sources that name a version of the code: a change in any of them starts new counts."""

MOST_FAILURES = 50
"""How many failures are described; all of them are counted."""


def code_version(sources: Sequence[str] = STORE_AND_RECORDER) -> str:
    """Twelve digits that name the present program in some folders or files of the package.

    Comments, docstrings and layout do not count: a sentence that is improved does not void what was tested.
    """
    digest = hashlib.sha256()
    for source in sources:
        path = PACKAGE / source
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".py", ".c", ".h"))
        for file in files:
            digest.update(str(file.relative_to(PACKAGE)).encode())
            digest.update(program(file))
    return digest.hexdigest()[:12]


def program(file: Path) -> bytes:
    """The statements of a Python file; any other file as it is."""
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree).encode()


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, or one below an attribute."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


class Results:
    """The file of one campaign. Several processes may add to it at the same time."""

    def __init__(self, campaign: str, unit: str, folder: Path = FOLDER, sources: Sequence[str] = STORE_AND_RECORDER):
        """unit: the name of the count that the campaign is about."""
        self.path = folder / f"torture-{campaign}.json"
        self.version = code_version(sources)
        self._campaign = campaign
        self._unit = unit
        self._sources = list(sources)

    def counts(self) -> Counter[str]:
        """Everything counted for this version of the code."""
        return Counter(self._read()["versions"].get(self.version, {}).get("counts", {}))

    def claim(self, seed: int, cases: int) -> range:
        """The numbers of the next cases of a seed, which no other process gets."""
        with self._changing() as mine:
            claimed = mine["claimed"]
            first = claimed.get(str(seed), 0)
            claimed[str(seed)] = first + cases
        return range(first, first + cases)

    def add(self, counts: Mapping[str, int], failures: Sequence[str], seconds: float) -> None:
        """Add what some cases gave."""
        with self._changing() as mine:
            mine["counts"] = dict(sorted((Counter(mine["counts"]) + Counter(counts)).items()))
            mine["failures"] = [*mine["failures"], *failures][:MOST_FAILURES]
            mine["seconds"] = round(mine["seconds"] + seconds, 1)
            mine["last"] = time.strftime("%Y-%m-%d")

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"campaign": self._campaign, "unit": self._unit, "sources": self._sources, "versions": {}}
        return dict(json.loads(self.path.read_text()))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """The entry of this version, written back afterwards, while no other process does the same."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            everything = self._read()
            today = time.strftime("%Y-%m-%d")
            order = len(everything["versions"])
            fresh = {"dualform": __version__, "order": order, "first": today, "last": today, "seconds": 0.0}
            mine = everything["versions"].setdefault(
                self.version, {**fresh, "claimed": {}, "counts": {}, "failures": [], "explained": {}}
            )
            yield mine
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
            unfinished.replace(self.path)
        finally:
            os.close(folder)
