"""Where a rank records: its own store in the folder of a run, which all ranks begin together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from dualform.errors import RecordingError
from dualform.record.ranks import Ranks
from dualform.record.resuming import EarlierRecording
from dualform.store.files import WritableFiles, folder_at, writing
from dualform.store.format import MANIFEST, Grouping, Manifest, read_manifest
from dualform.store.lock import prepare
from dualform.store.reader import Store
from dualform.store.run import SAME
from dualform.store.shards import RANKS, RunFile, is_run, read_run, write_run


def refuse_with_ranks(*, groupings: Sequence[Grouping], curvature: bool, on_write_error: str) -> None:
    """Refuse settings that are not recorded by several ranks."""
    if groupings:
        raise RecordingError(
            "totals= and several ranks: each rank knows its own rows only, so totals are not kept while they record. Build them from the "
            "slots when the recording is closed: dualform.build_totals(path, by)."
        )
    if curvature:
        raise RecordingError(
            "curvature=True and several ranks: each rank knows its own rows only. Leave it out: influence() estimates curvature from the slots."
        )
    if on_write_error == "stop":
        raise RecordingError(
            'on_write_error="stop" and several ranks: a rank that stopped recording would leave the others without its part of each step. '
            'Use "raise".'
        )


def open_place(
    path: str | os.PathLike[str], ranks: Ranks | None, resume: bool | int, *, overwrite: bool
) -> tuple[WritableFiles, EarlierRecording | None]:
    """Return the files to record into, empty, or with the recording that is gone on with."""
    if ranks is None:
        files = folder_at(path)
        if resume is False:
            prepare(files, overwrite=overwrite)
            return files, None
        _refuse_run(files)
        return files, EarlierRecording(files, None if resume is True else resume)
    own = folder_at(ranks.path_of_shard(path))
    if resume is False:
        if ranks.rank == 0:
            prepare(folder_at(path), overwrite=overwrite)
        ranks.gather()
        prepare(own, overwrite=overwrite)
        ranks.gather()
        return own, None
    steps = _sealed_steps(path, own, ranks)
    sealed = min(ranks.gather(steps))
    step = sealed if resume is True else resume
    if step > sealed:
        raise RecordingError(
            f"resume={step}: all ranks of {os.fspath(path)} have sealed step {sealed} and no later one. Go on from an earlier checkpoint, "
            f"or record into a new folder."
        )
    return own, EarlierRecording(own, step)


def _refuse_run(files: WritableFiles) -> None:
    if is_run(files):
        raise RecordingError(
            f"resume: {files.location} was recorded by {read_run(files).ranks} ranks. Resume it with as many: the next step of each "
            f"shard is made by its own rank."
        )


def _sealed_steps(path: str | os.PathLike[str], own: WritableFiles, ranks: Ranks) -> int:
    """Return how many steps this rank has sealed, if the run has as many ranks as now."""
    files = folder_at(path)
    if is_run(files):
        before = read_run(files).ranks
    elif MANIFEST in files.list():
        before = 1
    else:  # on a disk of its own
        before = int(read_manifest(own).settings.get(RANKS, "1"))
    unit = "process" if before == 1 else "ranks"
    if before != ranks.size:
        raise RecordingError(
            f"resume: {files.location} was recorded by {before} {unit}, and now there are {ranks.size}. Resume it with as many: the next step "
            f"of each shard is made by its own rank. With another number, record into a new folder."
        )
    return Store(own).end_step


def begin_run(path: str | os.PathLike[str], ranks: Ranks, name: str, *, is_new: bool) -> None:
    """Say that there is a run, once all of its shards have begun. name: its name, which the manifests of all shards have."""
    if ranks.rank == 0 and is_new:
        files = folder_at(path)
        with writing(files.location):
            write_run(files, RunFile(name, ranks.size))
    ranks.gather()


def agreed(ranks: Ranks, manifest: Manifest) -> Manifest:
    """Return the manifest with the name that rank 0 gives the run, if all ranks record the same of the same model."""
    manifests: list[Manifest] = ranks.gather(manifest)
    for field in SAME:
        said = [getattr(given, field) for given in manifests]
        other = next((rank for rank, found in enumerate(said) if found != said[0]), None)
        if other is not None:
            raise RecordingError(
                f"record() was called with another model or other settings on rank {other} than on rank 0: {field!r} differs. Give all ranks the "
                f"same model, optimizer and settings."
            )
    return replace(manifest, run=manifests[0].run)
