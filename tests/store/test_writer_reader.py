import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualform
from dualform.errors import StoreDamagedError, StoreError, StoreExistsError, StoreMissingError, WriterError
from dualform.store import writer as writing
from dualform.store.encoding import encode
from dualform.store.files import files_at
from dualform.store.format import MANIFEST, NO_ROW, VERSION, Column, Manifest, Parameter, checksum
from dualform.store.memory import Pool
from dualform.store.reader import Store
from dualform.store.records import Block, Rows, Step, Update
from dualform.store.writer import Writer
from training import linear, network, sgd, train

COLUMNS = (Column("sample_id", "Int64", "row"), Column("name", "String", "row"), Column("token", "Int64", "position"))


START = {"model.a.weight": torch.zeros(2, 3)}


def empty(dtype="float64"):
    return Manifest(
        version=VERSION,
        created_by="a test",
        keep="slots",
        dtype=dtype,
        layers=(linear("a", 3, 2, "a.weight", "a.bias"), linear("b", 2, 1, "b.weight")),
        parameters=(
            Parameter("a.weight", (2, 3), "float64"),
            Parameter("a.bias", (2,), "float64"),
            Parameter("b.weight", (1, 2), "float64"),
        ),
        left_out={},
        batch_axis={},
    )


def make_step(number, first_row, rows, positions, dtype="float64"):
    """A step with one batch through layer "a", and through "b" in even steps only."""
    generator = torch.Generator().manual_seed(number)

    def vectors(width):
        return torch.randn(rows * positions, width, generator=generator, dtype=torch.float64)

    step = Step(number, log={"loss": 0.5 * number} if number % 3 else {})
    columns = {
        "sample_id": np.arange(rows) + 10 * number,
        "name": [f"{number}/{row}" for row in range(rows)],
        "token": np.arange(rows * positions).reshape(rows, positions),
    }
    step.rows.append(Rows(first_row, rows, columns))
    step.keys, step.errors = vectors(3).round(), vectors(2)  # rounded, so that some keys are equal
    for layer, (keys, errors) in enumerate([(step.keys, step.errors), (vectors(2), vectors(1))]):
        if layer == 0 or number % 2 == 0:
            step.blocks.append(
                Block(
                    layer=layer,
                    backward=0,
                    call=0,
                    first_row=first_row,
                    rows=rows,
                    positions=positions,
                    keys=encode(keys, dtype),
                    errors=encode(errors, dtype),
                    may_repeat=layer == 0,
                )
            )
    gradient = np.full(2, float(number))
    settings = [{"lr": 0.1}, {"lr": 0.1 * number}]
    step.updates.append(
        Update("sgd", [0, 1], settings, [[1.0], [1.0, 0.5]], [1e-17, 0.0], [1.0, 2.0], [None, gradient])
    )
    return step


def write(folder, shapes, **settings):
    writer = Writer(files_at(folder), empty(), Pool(), START, **settings)
    steps, first_row = [], 0
    for number, (rows, positions) in enumerate(shapes):
        step = make_step(number, first_row, rows, positions)
        first_row += rows
        steps.append((step.keys.clone(), step.errors.clone()))
        writer.put(step, COLUMNS)
    writer.snapshot(len(shapes), {"model.a.weight": torch.ones(2, 3), "model.flag": torch.tensor(True)})
    writer.close("closed")
    return steps


def everything(folder):
    """All that a store says, put together from its chunks."""
    store = Store(files_at(folder))
    found = {"rows": store.rows, "updates": store.updates, "log": store.log}
    for layer in ("a", "b"):
        chunks = list(store.chunks(layer))
        for name in ("keys", "errors"):
            pieces = [
                chunk.keys(torch.float64).vectors() if name == "keys" else chunk.errors(torch.float64)
                for chunk in chunks
            ]
            found[f"{layer}.{name}"] = torch.cat(pieces) if pieces else torch.zeros(0)
        blocks = np.concatenate([np.zeros((0, 7), int), *(chunk.blocks for chunk in chunks)])
        found[f"{layer}.blocks"] = blocks[blocks[:, 4] > 0]  # blocks without rows may be passed over
        found[f"{layer}.row"] = np.concatenate([np.zeros(0, int), *(chunk.rows() for chunk in chunks)])
    found["gradients"] = store.gradients("a.bias")
    return found


def assert_same(one, other):
    for name, value in one.items():
        if isinstance(value, pl.DataFrame):
            assert value.equals(other[name].select(value.columns)), name
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, other[name], err_msg=name)
        else:
            assert (value is None and other[name] is None) or torch.equal(value, other[name]), name


SHAPES = [(3, 2), (1, 1), (4, 1), (0, 1), (2, 3)]


def test_what_is_written_is_read(tmp_path):
    steps = write(tmp_path / "s", SHAPES)
    store, found = Store(files_at(tmp_path / "s")), everything(tmp_path / "s")
    assert torch.equal(found["a.keys"], torch.cat([keys for keys, _ in steps]))
    assert torch.equal(found["a.errors"], torch.cat([errors for _, errors in steps]))
    assert found["rows"]["step"].to_list() == [0, 0, 0, 1, 2, 2, 2, 2, 4, 4]
    assert found["rows"]["name"].to_list()[:4] == ["0/0", "0/1", "0/2", "1/0"]
    assert found["rows"]["token"].to_list()[:2] == [[0, 1], [2, 3]]
    assert found["rows"]["token"].to_list()[-1] == [3, 4, 5]
    assert found["a.row"].tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8, 8, 9, 9, 9]
    assert found["log"]["loss"].to_list() == [None, 0.5, 1.0, None, 2.0]
    assert found["updates"].filter(pl.col("parameter") == 1)["factors"].to_list() == [[1.0, 0.5]] * 5
    assert found["gradients"].tolist() == [[float(n)] * 2 for n in range(5)]
    assert store.slots("a") == 17
    assert store.slots("b") == 16
    assert (store.end_step, store.snapshot_steps(), store.manifest.ended) == (5, [0, 5], "closed")
    assert store.snapshot(5)["model.a.weight"].tolist() == torch.ones(2, 3).tolist()
    assert store.snapshot(5)["model.flag"].item() is True
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file() and path.name != MANIFEST]
    assert store.nbytes == sum(path.stat().st_size for path in files)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6),
    chunk_bytes=st.sampled_from([1, 600, 2000]),
    queue_bytes=st.sampled_from([1, 1000, 1 << 20]),
)
def test_chunk_and_queue_sizes_change_nothing(shapes, chunk_bytes, queue_bytes):
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "one", shapes)
        write(Path(folder) / "many", shapes, chunk_bytes=chunk_bytes, queue_bytes=queue_bytes)
        if chunk_bytes == 1:
            assert len(Store(files_at(Path(folder) / "many")).manifest.chunks) == len(shapes)
        assert_same(everything(Path(folder) / "one"), everything(Path(folder) / "many"))


def test_a_store_can_be_cut_at_any_step(tmp_path):
    write(tmp_path / "s", SHAPES, chunk_bytes=1500)
    store = Store(files_at(tmp_path / "s"))
    whole = everything(tmp_path / "s")
    for end, slots in enumerate([0, 6, 7, 11, 11, 17]):
        keys = [chunk.keys(torch.float64).vectors() for chunk in store.chunks("a", end_step=end)]
        assert torch.equal(torch.cat([torch.zeros(0, 3), *keys]), whole["a.keys"][:slots])


def write_silent(folder, flags, **settings):
    """A step for each entry of flags: which slots of layer "a" are silent, or None."""
    writer = Writer(files_at(folder), empty(), Pool(), START, **settings)
    for number, silent in enumerate(flags):
        step = make_step(number, 3 * number, 3, 1)
        step.blocks[0].silent = None if silent is None else np.array(silent)
        writer.put(step, COLUMNS)
    writer.close("closed")
    return Store(files_at(folder))


FLAGS = [None, [True, False, False], None, [False, True, True]]


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_flags_of_silent_slots(tmp_path, chunk_bytes):
    store = write_silent(tmp_path / "s", FLAGS, chunk_bytes=chunk_bytes)
    found = [np.zeros(c.slots, bool) if c.silent is None else c.silent for c in store.chunks("a")]
    assert np.concatenate(found).tolist() == [False] * 3 + FLAGS[1] + [False] * 3 + FLAGS[3]
    assert all(chunk.silent is None for chunk in store.chunks("b"))
    [*_, last] = store.chunks("a", end_step=3)
    assert (last.silent is None) == (chunk_bytes == 1)  # only the flags of steps that count
    assert len(last.silent if last.silent is not None else []) in (0, last.slots)


def test_flags_take_no_room_where_no_slot_is_silent(tmp_path):
    store = write_silent(tmp_path / "s", FLAGS[:1])
    assert not any(name.endswith(".silent") for name in store.chunk_file(0))


# Slots that serve all rows


def write_shared(folder, **settings):
    """Three steps, with a block without a row between the others of layer "a"; the last step of "a" has nothing else."""
    writer = Writer(files_at(folder), empty(), Pool(), START, **settings)
    for number in range(3):
        step = make_step(number, 2 * number, 2, 2)
        keys, errors = torch.full((3, 3), float(number)), torch.ones(3, 2)
        both = encode(keys.double(), "float64"), encode(errors.double(), "float64")
        step.blocks.append(Block(0, 0, 1, NO_ROW, 1, 3, *both, may_repeat=True))
        if number == 2:
            step.blocks = [block for block in step.blocks if block.first_row == NO_ROW]
        writer.put(step, COLUMNS)
    writer.close("closed")
    return Store(files_at(folder))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_slots_without_a_row(tmp_path, chunk_bytes):
    store = write_shared(tmp_path / "s", chunk_bytes=chunk_bytes)
    chunks = list(store.chunks("a"))
    none = [NO_ROW] * 3
    assert np.concatenate([chunk.rows() for chunk in chunks]).tolist() == [0, 0, 1, 1, *none, 2, 2, 3, 3, *none, *none]
    positions = [0, 1, 0, 1, 0, 1, 2]
    assert np.concatenate([chunk.positions() for chunk in chunks]).tolist() == [*positions, *positions, 0, 1, 2]
    assert [chunk.row_range for chunk in chunks] == ([(0, 2), (2, 4), (0, 0)] if chunk_bytes == 1 else [(0, 4)])
    assert all(chunk.shared is None for chunk in store.chunks("b"))
    tables = pl.concat([store.slot_table(chunk, ["step", "name", "token"]) for chunk in chunks])
    assert tables["step"].to_list() == [0] * 7 + [1] * 7 + [2] * 3
    assert tables["name"].to_list() == [
        *["0/0", "0/0", "0/1", "0/1", None, None, None],
        *["1/0", "1/0", "1/1", "1/1", None, None, None],
        *[None] * 3,
    ]
    assert tables["token"].to_list() == [0, 1, 2, 3, None, None, None] * 2 + [None] * 3


def test_a_store_without_a_step(tmp_path):
    write(tmp_path / "s", [])
    found = everything(tmp_path / "s")
    assert found["rows"].height == found["updates"].height == found["log"].height == 0
    assert found["gradients"] is None


def test_a_store_is_nothing_but_safetensors_parquet_and_json(tmp_path):
    write(tmp_path / "s", SHAPES, chunk_bytes=1)
    suffixes = {path.suffix for path in (tmp_path / "s").rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".parquet", ".json", ".lock"}


def test_opening_reads_the_manifest_alone(tmp_path, monkeypatch):
    write(tmp_path / "s", SHAPES, chunk_bytes=1)
    opened = []
    original = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(Path(path).name) or original(path, *a, **k))
    Store(files_at(tmp_path / "s"))
    assert opened == [MANIFEST]


# Damage: every file, in every way. The file is named.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "whole"
    write(folder, SHAPES, chunk_bytes=1500)
    return folder


FILES = [
    "chunk-000000/slots.safetensors",
    "chunk-000000/rows.parquet",
    "chunk-000001/updates.parquet",
    "chunk-000000/steps.parquet",
    "snapshot-000000005.safetensors",
    MANIFEST,
]


def read_all(folder):
    everything(folder)
    store = Store(files_at(folder))
    for step in store.snapshot_steps():
        for name in store.snapshot(step):
            store.snapshot(step)[name]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"more")


def make_empty(path):
    path.write_bytes(b"")


def alter_the_first_byte(path):
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def alter_the_middle(path):
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def alter_the_end(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def make_foreign(path):
    path.write_bytes(b"\x93NUMPY" + bytes(path.stat().st_size - 6))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [truncate, lengthen, make_empty, alter_the_first_byte, alter_the_middle, alter_the_end, make_foreign],
)
def test_a_damaged_file_is_named(tmp_path, whole, name, damage):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    damage(folder / name)
    with pytest.raises(StoreDamagedError, match=Path(name).name.replace(".", r"\.")) as raised:
        read_all(folder)
    assert name in str(raised.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path, whole, name):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folder / name).unlink()
    with pytest.raises(StoreError, match=Path(name).name.replace(".", r"\.")) as raised:
        read_all(folder)
    assert isinstance(raised.value, StoreMissingError if name == MANIFEST else StoreDamagedError)


def test_a_file_of_another_chunk_is_no_replacement(tmp_path, whole):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    shutil.copy(folder / "chunk-000001/rows.parquet", folder / "chunk-000000/rows.parquet")
    with pytest.raises(StoreDamagedError, match=r"chunk-000000/rows\.parquet"):
        read_all(folder)


def test_a_manifest_whose_chunks_make_no_sense(tmp_path, whole):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    data = json.loads((folder / MANIFEST).read_text())
    data.pop("checksum")
    data["chunks"][0]["files"].pop("rows.parquet")
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    (folder / MANIFEST).write_text(json.dumps({**data, "checksum": checksum(canonical)}))
    with pytest.raises(StoreDamagedError, match="chunk 0 is not as expected"):
        Store(files_at(folder))


def test_files_the_manifest_does_not_name_are_passed_over(tmp_path, whole):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    shutil.copytree(folder / "chunk-000000", folder / ".chunk-000099")
    (folder / ".snapshot-000000099.safetensors").write_text("half written")
    assert_same(everything(whole), everything(folder))


def test_a_killed_writer_leaves_what_was_sealed(tmp_path):
    writer = Writer(files_at(tmp_path / "s"), empty(), Pool(), START, chunk_bytes=1, queue_bytes=1)
    for number in range(4):
        writer.put(make_step(number, 2 * number, 2, 1), COLUMNS)
    writer.wait()  # a copy of a folder that is being written would not be of one moment
    shutil.copytree(tmp_path / "s", tmp_path / "killed", ignore=shutil.ignore_patterns(".*"))
    writer.put(make_step(4, 8, 2, 1), COLUMNS)
    writer.close("closed")
    killed, whole = Store(files_at(tmp_path / "killed")), everything(tmp_path / "s")
    assert killed.manifest.ended is None
    assert killed.end_step == 4
    found = everything(tmp_path / "killed")
    assert torch.equal(found["a.keys"], whole["a.keys"][: 2 * killed.end_step])
    assert found["rows"].equals(whole["rows"][: 2 * killed.end_step])


def test_everything_is_flushed_before_the_manifest_names_it(tmp_path, monkeypatch):
    flushed = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.fstat(descriptor).st_ino))
    original = Path.replace

    def publish(path, target):
        if target.name == MANIFEST:
            manifest = json.loads(path.read_text())
            named = [tmp_path / "s" / f"snapshot-{entry['step']:09d}.safetensors" for entry in manifest["snapshots"]]
            for number, chunk in enumerate(manifest["chunks"]):
                named.append(tmp_path / "s" / f"chunk-{number:06d}")
                named += [named[-1] / name for name in chunk["files"]]
            missing = [found for found in [path, *named] if found.stat().st_ino not in flushed]
            assert not missing
        return original(path, target)

    monkeypatch.setattr(Path, "replace", publish)
    write(tmp_path / "s", SHAPES, chunk_bytes=1500)
    assert Store(files_at(tmp_path / "s")).end_step == len(SHAPES)


# A path in use


def test_a_recording_is_not_overwritten_unasked(tmp_path):
    train(tmp_path / "run", steps=1)
    with pytest.raises(StoreExistsError, match=r"run holds a recording already.*overwrite=True"):
        train(tmp_path / "run", steps=1)
    assert dualform.open(tmp_path / "run").info()["steps"] == 1


def test_a_recording_is_overwritten_when_asked(tmp_path):
    train(tmp_path / "run", steps=3, chunk_bytes=1)
    run = train(tmp_path / "run", steps=1, overwrite=True)
    assert run.dual.info()["steps"] == 1
    assert run.dual.info()["snapshots"] == [0, 1]
    assert run.dual.verify().passed
    assert not (tmp_path / "run" / "chunk-000001").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_path_that_another_recorder_writes_to(tmp_path, overwrite):
    model = network()
    with (
        dualform.record(model, sgd(model), tmp_path / "run"),
        pytest.raises(StoreExistsError, match=r"run (is being written|holds a recording)"),
    ):
        dualform.record(model, sgd(model), tmp_path / "run", overwrite=overwrite)
    assert dualform.open(tmp_path / "run").info()["ended"] == "closed"


def test_an_empty_folder_is_no_obstacle(tmp_path):
    (tmp_path / "run").mkdir()
    assert train(tmp_path / "run", steps=1).dual.verify().passed


def test_a_file_is_never_replaced(tmp_path):
    (tmp_path / "run").write_text("precious")
    with pytest.raises(StoreExistsError, match="run is a file"):
        train(tmp_path / "run", steps=1, overwrite=True)
    assert (tmp_path / "run").read_text() == "precious"


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "writer.lock"])
def test_overwrite_never_removes_a_folder_that_is_no_recording(tmp_path, name):
    folder = tmp_path / "thesis"
    (folder / "chapters").mkdir(parents=True)
    (folder / "chapters" / "one.txt").write_text("precious")
    (folder / name).write_text('{"name": "a web page"}')
    with pytest.raises(StoreExistsError, match=r"thesis .*no recording"):
        train(folder, steps=1, overwrite=True)
    assert (folder / "chapters" / "one.txt").read_text() == "precious"
    assert (folder / name).read_text() == '{"name": "a web page"}'


def test_overwrite_leaves_what_does_not_belong_to_the_recording(tmp_path):
    train(tmp_path / "run", steps=1)
    (tmp_path / "run" / "notes.txt").write_text("precious")
    with suppress(StoreExistsError):  # refusing is as good
        train(tmp_path / "run", steps=1, overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "precious"


# The background thread


def test_an_error_in_the_background_is_raised_at_the_next_call(tmp_path, monkeypatch):
    def full(files, name, tensors, label):
        raise OSError(28, "No space left on device")

    writer = Writer(files_at(tmp_path / "s"), empty(), Pool(), START, chunk_bytes=1, queue_bytes=1)
    writer.put(make_step(0, 0, 2, 1), COLUMNS)
    writer.put(make_step(1, 2, 2, 1), COLUMNS)  # waits until step 0 is sealed
    monkeypatch.setattr(writing, "write_tensors", full)
    with pytest.raises(WriterError, match=r"No space left on device.*sealed before"):
        for number in range(2, 9):
            writer.put(make_step(number, 2 * number, 2, 1), COLUMNS)
    with pytest.raises(WriterError, match="No space left"):
        writer.check()
    with pytest.raises(WriterError, match="No space left"):
        writer.close("closed")
    store = Store(files_at(tmp_path / "s"))
    assert store.end_step >= 1
    assert store.rows.height == 2 * store.end_step


def test_after_an_error_in_the_background_training_stops_with_it(tmp_path, monkeypatch):
    def fail_from_now_on(step):
        if step == 2:
            monkeypatch.setattr(writing, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))

    with pytest.raises(WriterError, match="disk full"):
        train(tmp_path / "run", steps=30, chunk_bytes=1, queue_bytes=1, after_step=fail_from_now_on)
    assert dualform.open(tmp_path / "run").info()["steps"] >= 1
