"""The folder of a run that several processes (ranks) have recorded: `run.json`, and one store for each of them.

Each rank writes its own store, a shard, and nobody else does. Rank 0 writes `run.json` once all shards have begun, so a folder with this
file can be opened at any time, even if a rank was killed since.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dualform.arrays import Bytes
from dualform.errors import StoreDamagedError, StoreError, StoreVersionError
from dualform.layers.layer import Count
from dualform.store.files import Files, WritableFiles, address
from dualform.store.format import Manifest, Totals, checksum, compact_json

RUN = "run.json"
VERSION = 1
FORMAT = "dualform run"
RANK = "rank"
RANKS = "ranks"
"""What the settings of a shard's manifest say: which rank has written it, and how many ranks there were."""
SHARD_NAME = re.compile(r"rank-\d+")
MOST = 16 << 20
"""The size of run.json, at most."""


@dataclass(frozen=True)
class RunFile:
    """What `run.json` says."""

    run: str
    """A random name of the run, which all files of all shards have in their labels."""
    ranks: Count
    """How many ranks there were, and so how many shards there are."""
    totals: Totals | None = None
    """Totals that were built from the slots of all shards."""


def shard_name(rank: int) -> str:
    """Return the folder of a shard within the folder of the run."""
    return f"rank-{rank}"


def is_run(files: Files) -> bool:
    """Whether a folder has a `run.json`."""
    try:
        files.size(RUN)
    except StoreError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return False
        raise
    return True


def write_run(files: WritableFiles, run: RunFile) -> None:
    """Write `run.json`, in place of one that is there."""
    content = msgspec.to_builtins(run)
    whole = {"format": FORMAT, "version": VERSION, **content}
    whole["checksum"] = _digest(whole)
    text = msgspec.json.format(msgspec.json.encode(whole), indent=1)
    files.write(f".{RUN}", text + b"\n")
    files.publish(f".{RUN}", RUN)


def write_totals_of_run(files: WritableFiles, manifest: Manifest) -> None:
    """Name the totals of a manifest, which is that of the whole run, in `run.json`."""
    write_run(files, replace(read_run(files), totals=manifest.totals))


def read_run(files: Files) -> RunFile:
    """Read and check `run.json`."""
    path = address(files, RUN)
    try:
        data = msgspec.json.decode(files.read_range(RUN, 0, MOST))
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise StoreDamagedError(f"{path} is damaged: it is no JSON ({error}).") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StoreDamagedError(f'{path} describes no run of dualform (its "format" is not {FORMAT!r}).')
    if data.get("version") != VERSION:
        raise StoreVersionError(
            f"{path} is of version {data.get('version')!r}; this version of dualform reads {VERSION}. Upgrade: pip install -U dualform."
        )
    if data.pop("checksum", None) != _digest(data):
        raise StoreDamagedError(f"{path} is damaged: its checksum does not fit its content.")
    try:
        run = msgspec.convert({"run": data["run"], "ranks": data["ranks"], "totals": data["totals"]}, RunFile)
    except (KeyError, msgspec.MsgspecError) as error:
        raise StoreDamagedError(f"{path} is damaged: {error}.") from None
    if run.ranks < 1:
        raise StoreDamagedError(f"{path} is damaged: it says that there are no shards.")
    return run


def _digest(content: dict[str, Any]) -> str:
    return checksum(compact_json(content).encode())


class ShardFiles:
    """The files of a shard, read through the files of its run."""

    def __init__(self, files: Files, rank: int):
        self._files = files
        self._folder = shard_name(rank)
        self.location = f"{files.location}/{self._folder}"

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return self._files.size(f"{self._folder}/{name}")

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return self._files.read(f"{self._folder}/{name}")

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`, or fewer if the file ends before."""
        return self._files.read_range(f"{self._folder}/{name}", begin, end)

    def map(self, name: str) -> Bytes:
        """Return the content of a file as an array."""
        return self._files.map(f"{self._folder}/{name}")
