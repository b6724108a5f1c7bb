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


DAMAGES = {
    "another content": lambda data: b"PAR1 cut",
    "cut off": lambda data: data[:-3],
    "one byte changed": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_named(tmp_path, damage):
    files = LocalFiles(tmp_path)
    write_samples(files, TABLE)
    path = tmp_path / SAMPLES
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(StoreDamagedError, match=SAMPLES):
        read_samples(files)
