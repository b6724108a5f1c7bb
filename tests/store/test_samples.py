import polars as pl
import pytest
from test_other_files import FilesInMemory

from dualform.errors import RecordingError, StoreDamagedError, WriterError
from dualform.store import samples as module
from dualform.store.files import LocalFiles
from dualform.store.samples import SAMPLES, read_samples, with_earlier, write_samples

RUN = "a run"
TABLE = pl.DataFrame({"sample_id": [3, 5], "text": ["one", "two"]})


@pytest.fixture
def files(tmp_path):
    return LocalFiles(tmp_path)


def test_what_is_written_is_read(files):
    write_samples(files, RUN, TABLE)
    assert read_samples(files, RUN).equals(TABLE)
    write_samples(files, RUN, TABLE[:1])
    assert read_samples(files, RUN).equals(TABLE[:1])


def test_a_run_without_samples_has_none(files):
    assert read_samples(files, RUN) is None
    assert read_samples(FilesInMemory({}), RUN) is None


DAMAGES = {
    "empty": lambda data: b"",
    "another content": lambda data: b"PAR1 cut",
    "without its first line": lambda data: data.partition(b"\n")[2],
    "cut off": lambda data: data[:-3],
    "one byte changed": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "one byte of the checksum changed": lambda data: bytes([data[0] ^ 1]) + data[1:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_named(files, damage):
    write_samples(files, RUN, TABLE)
    path = files.path(SAMPLES)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(StoreDamagedError, match=f"{SAMPLES} is damaged: its checksum does not fit"):
        read_samples(files, RUN)


def test_the_table_of_another_run_is_refused(files):
    """A file that was copied would name its own documents."""
    write_samples(files, "another run", TABLE)
    with pytest.raises(StoreDamagedError, match="it belongs to another run"):
        read_samples(files, RUN)


def test_a_table_that_would_take_too_much_memory_is_not_read(files, monkeypatch):
    write_samples(files, RUN, TABLE)
    monkeypatch.setattr(module, "table_limit", lambda nbytes: 10)
    with pytest.raises(StoreDamagedError, match=r"it would take [0-9]+ bytes of memory"):
        read_samples(files, RUN)


@pytest.mark.parametrize("stage", ["write", "publish"])
def test_a_writer_that_fails_leaves_the_table_that_was_there(files, monkeypatch, stage):
    write_samples(files, RUN, TABLE)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, stage, fail)
        with pytest.raises(WriterError, match="The disk is full"):
            write_samples(files, RUN, TABLE[:1])
    assert read_samples(files, RUN).equals(TABLE)
    write_samples(files, RUN, TABLE[:1])
    assert read_samples(files, RUN).equals(TABLE[:1])


class TestResumed:
    def test_samples_that_are_gone_stay_known(self):
        now = pl.DataFrame({"sample_id": [5, 7], "text": ["two", "three"]})
        assert with_earlier(now, TABLE).to_dict(as_series=False) == {"sample_id": [5, 7, 3], "text": ["two", "three", "one"]}  # fmt: skip

    def test_nothing_was_known_before(self):
        assert with_earlier(TABLE, None) is TABLE

    def test_other_columns_are_kept_of_samples_now(self):
        now = pl.DataFrame({"sample_id": [5], "label": [1]})
        assert with_earlier(now, TABLE).rows() == [(5, 1, None), (3, None, "one")]

    def test_a_sample_with_another_text_is_refused(self):
        now = pl.DataFrame({"sample_id": [5, 3], "text": ["another", "one"]})
        with pytest.raises(
            RecordingError, match=r"sample 5 had another text when it was recorded: 'two', now 'another' \(1 such"
        ):
            with_earlier(now, TABLE)

    @pytest.mark.parametrize("now", [{"number": [1]}, {"sample_id": ["5"], "text": ["another"]}], ids=["no id", "text"])
    def test_names_of_another_kind_replace_what_was_there(self, now):
        now = pl.DataFrame(now)
        assert with_earlier(now, TABLE) is now

    def test_a_column_of_another_type_is_as_it_is_now(self):
        now = pl.DataFrame({"sample_id": [5], "text": [1]})
        assert with_earlier(now, TABLE).rows() == [(5, 1), (3, None)]
