"""Writing totals: a folder of their own, which replaces the one before."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
from torch import Tensor

from dualform.store.folder import flush_folder, publish, write_table
from dualform.store.format import SUMS, Grouping, Manifest, Totals, groups_name, totals_name
from dualform.store.labels import Labels, totals_about
from dualform.store.tensor_writer import write_tensors


@dataclass(frozen=True)
class NewTotals:
    """All totals after `step` updates: tensors, and for each grouping the table of its groups."""

    step: int
    rows: int
    groupings: Sequence[Grouping]
    tensors: dict[str, Tensor]
    groups: Sequence[pl.DataFrame]

    @property
    def nbytes(self) -> int:
        """How much memory it takes, roughly."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def write_totals(folder: Path, manifest: Manifest, new: NewTotals) -> Manifest:
    """Write a folder of totals; gives the manifest that names it. Totals of other steps are removed."""
    number = manifest.totals.number + 1 if manifest.totals else 0
    target, unfinished = folder / totals_name(number), folder / f".{totals_name(number)}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    totals = Totals(number, new.step, new.rows, tuple(new.groupings), files={})
    names = [SUMS, *(groups_name(grouping) for grouping in range(len(new.groups)))]
    writer = Labels(manifest)
    labels = {name: writer.write(f"{target.name}/{name}", totals_about(totals)) for name in names}
    tensors = {name: [tensor.numpy()] for name, tensor in new.tensors.items()}
    files = {SUMS: write_tensors(unfinished / SUMS, tensors, labels[SUMS])}
    for grouping, table in enumerate(new.groups):
        name = groups_name(grouping)
        files[name] = write_table(unfinished / name, table, labels[name])
    flush_folder(unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    written = replace(manifest, totals=replace(totals, files=files))
    publish(folder, written)
    for path in folder.glob("totals-*"):
        if path.name != target.name:
            shutil.rmtree(path, ignore_errors=True)
    return written
