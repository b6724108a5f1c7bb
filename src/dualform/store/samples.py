"""The samples of a run: what is known of each, such as its text, stored once and not for each visit."""

from __future__ import annotations

import io

import polars as pl

from dualform.errors import StoreDamagedError
from dualform.store.files import Files, WritableFiles, address
from dualform.store.format import checksum

SAMPLES = "samples.table"
"""A line with the checksum of the rest, which is a Parquet file. The manifest does not name it: it can be written again at any time."""


def write_samples(files: WritableFiles, samples: pl.DataFrame) -> None:
    """Write the table of samples of a run, one line for each, in place of one that is there."""
    buffer = io.BytesIO()
    samples.write_parquet(buffer, compression="zstd")
    content = buffer.getvalue()
    files.write(f".{SAMPLES}", f"{checksum(content)}\n".encode() + content)
    files.publish(f".{SAMPLES}", SAMPLES)


def read_samples(files: Files) -> pl.DataFrame | None:
    """Read the table of samples; None if the run has none."""
    try:
        data = files.read(SAMPLES)
    except StoreDamagedError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    digest, _, content = data.partition(b"\n")
    if digest != checksum(content).encode():
        raise StoreDamagedError(f"{address(files, SAMPLES)} is damaged: its checksum does not fit.")
    return pl.read_parquet(io.BytesIO(content))
