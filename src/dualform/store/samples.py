"""The samples of a run: what is known of each, such as its text, stored once and not for each visit.

The manifest does not name the file, which can be written again at any time: it has a checksum of its own in its first line, and a label
with its run. It is published whole, after the manifest of its run. A writer that is killed leaves the table that was there before, or none.
"""

from __future__ import annotations

import io

import polars as pl

from dualform.errors import RecordingError, StoreDamagedError
from dualform.store.consistency import table_limit
from dualform.store.files import Files, WritableFiles, address, read_if_there, writing
from dualform.store.format import checksum, compact_json, shortened
from dualform.store.labels import LABEL
from dualform.store.parquet import describe

SAMPLES = "samples.table"
"""A line with the checksum of the rest, which is a Parquet file."""
ID = "sample_id"


def write_samples(files: WritableFiles, run: str, samples: pl.DataFrame) -> None:
    """Write the table of samples of a run, one line for each, in place of one that is there."""
    buffer = io.BytesIO()
    samples.write_parquet(buffer, compression="zstd", metadata={LABEL: _label(run)})
    content = buffer.getvalue()
    with writing(files.location):
        files.write(f".{SAMPLES}", f"{checksum(content)}\n".encode() + content)
        files.publish(f".{SAMPLES}", SAMPLES)


def read_samples(files: Files, run: str) -> pl.DataFrame | None:
    """Read the table of samples of a run; None if it has none."""
    data = read_if_there(files, SAMPLES)
    if data is None:
        return None
    digest, _, content = data.partition(b"\n")
    try:
        _check(digest, content, run)
        return pl.read_parquet(io.BytesIO(content))
    except (ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise StoreDamagedError(
            f"{address(files, SAMPLES)} is damaged: {error}. Restore it from a copy of the recording, or remove it: "
            f"without it, texts are not known."
        ) from None


def _check(digest: bytes, content: bytes, run: str) -> None:
    """Raise ValueError unless the file is whole and of this run, before any of it is decoded."""
    if digest != checksum(content).encode():
        raise ValueError("its checksum does not fit")
    described = describe(content)
    if described.metadata.get(LABEL) != _label(run):
        raise ValueError("it belongs to another run")
    if described.nbytes > table_limit(len(content)):
        raise ValueError(f"it would take {described.nbytes:,} bytes of memory")


def _label(run: str) -> str:
    return compact_json({"run": run, "file": SAMPLES})


def with_earlier(samples: pl.DataFrame, earlier: pl.DataFrame | None) -> pl.DataFrame:
    """Return the samples of a run that is resumed: those given, and those that it has been trained on before.

    A sample that was something else before is refused: its name would stand for both.
    """
    if earlier is None or ID not in samples.columns or samples.schema[ID] != earlier.schema.get(ID):
        return samples
    # A column whose type has changed cannot be compared: as it is now, it counts
    known = [name for name in earlier.columns if samples.schema.get(name, earlier.schema[name]) == earlier.schema[name]]
    earlier = earlier.select(known)
    _refuse_changed(samples, earlier)
    gone = earlier.join(samples, on=ID, how="anti", maintain_order="left")
    return pl.concat([samples, gone], how="diagonal")


def _refuse_changed(samples: pl.DataFrame, earlier: pl.DataFrame) -> None:
    """Raise RecordingError if a sample had another entry in a column that both tables have."""
    both = samples.join(earlier, on=ID, suffix="_before", maintain_order="left")
    for name in earlier.columns:
        if name == ID or name not in samples.columns:
            continue
        changed = both.filter(pl.col(name).ne_missing(pl.col(f"{name}_before")))
        if changed.height:
            one = changed.row(0, named=True)
            raise RecordingError(
                f"sample {one[ID]} had another {name} when it was recorded: {shortened(one[f'{name}_before'])}, now {shortened(one[name])} "
                f"({changed.height:,} such samples). Resume with the dataset that the run began with, or record into another folder."
            )
