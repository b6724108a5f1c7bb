"""The folder of a run that several processes (ranks) have recorded: `run.json`, and one store for each of them.

Each rank writes its own store, a shard, and nobody else does. Rank 0 writes `run.json` once all shards have begun, so a folder with this
file can be opened at any time, even if a rank was killed since.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dualform.errors import StoreDamagedError, StoreError, StorePermissionError, StoreVersionError
from dualform.layers.layer import Count
from dualform.store.files import Files, WritableFiles, address, files_within
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
    except StorePermissionError as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        return False  # S3 says so of a file that is not there, to whoever may not list; reading the manifest will tell
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


def shard_files(files: Files, rank: int) -> Files:
    """Return the files of a shard, read through the files of its run."""
    return files_within(files, f"{shard_name(rank)}/")
