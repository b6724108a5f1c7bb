import polars as pl
import pytest

from dualform.errors import StoreDamagedError
from dualform.store.files import LocalFiles
from dualform.store.samples import SAMPLES, read_samples, write_samples

TABLE = pl.DataFrame({"sample_id": [3, 5], "text": ["one", "two"]})


def test_what_is_written_is_read(tmp_path):
    files = LocalFiles(tmp_path)
    write_samples(files, TABLE)
    assert read_samples(files).equals(TABLE)
    write_samples(files, TABLE[:1])
    assert read_samples(files).equals(TABLE[:1])


def test_a_run_without_samples_has_none(tmp_path):
    assert read_samples(LocalFiles(tmp_path)) is None


def test_a_damaged_table_is_named(tmp_path):
    (tmp_path / SAMPLES).write_bytes(b"PAR1 cut")
    with pytest.raises(StoreDamagedError, match=SAMPLES):
        read_samples(LocalFiles(tmp_path))
