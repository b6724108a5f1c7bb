"""A manifest whose parts do not fit each other is refused, with the reason."""

import json
from dataclasses import replace

import pytest
from inconsistent import record, set_at, write_manifest

from dualform.store import consistency
from dualform.store.consistency import check_manifest
from dualform.store.files import files_at
from dualform.store.format import MANIFEST, read_manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("consistency") / "whole"
    record(folder)
    return folder


def test_what_the_recorder_writes_is_consistent(whole):
    check_manifest(read_manifest(files_at(whole)))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            ("keep",),
            "everything",
            "keep is 'everything'; expected one of 'slots', 'rows', 'projected', 'keys', 'totals', 'mixed'",
        ),
        (("dtype",), "float8", "dtype is 'float8'"),
        (("columns", 0, "type"), "Object", "the type of column 'sample_id' is 'Object'"),
        (("columns", 0, "per"), "epoch", "per of column 'sample_id' is 'epoch'"),
        (("columns", 0, "name"), "step", "two of its columns are called the same"),
        (("columns", 0, "name"), "label", "two of its columns are called the same"),
        (("parameters", 0, "name"), "head.bias", "two of its parameters are called the same"),
        (("parameters", 0, "dtype"), "complex64", "the type of 'first.weight' is 'complex64'"),
        (("parameters", 0, "shape"), [2**40], "parameter 'first.weight' of shape .* is larger than the whole store"),
        (("parameters", 0, "shape"), [1] * 40, "is larger than the whole store"),
        (("parameters", 0, "shape"), [8, 4], "'first.weight' of shape .* does not fit layer 'first'"),
        (("layers", 0, "name"), "head", "two of its layers are called the same"),
        (("layers", 0, "form"), "images", "the form of layer 'first' is 'images'"),
        (("layers", 0, "form"), "maps", "has feature maps or their geometry, but not both"),
        (("layers", 0, "uses"), [], "layer 'first' uses no parameter"),
        (("layers", 0, "outputs"), [4], "the kept outputs of layer 'first' are not among its 4 outputs"),
        (("layers", 0, "outputs"), [1, 1], "the kept outputs of layer 'first'"),
        (("layers", 0, "uses", 0, "parameter"), "nothing", "uses a parameter 'nothing' that is not there"),
        (("layers", 0, "uses", 0, "role"), "guest", "the role of 'first.weight' in layer 'first' is 'guest'"),
        (("layers", 0, "uses", 0, "rows"), [0, 9], "the ranges .* do not lie within 4 columns"),
        (("layers", 0, "uses", 0, "keys"), [0], "the ranges .* do not lie within 8 columns"),
        (("layers", 0, "uses", 0, "keys"), [4, 2], "the ranges .* do not lie within 8 columns"),
        (("layers", 0, "uses", 0, "groups"), 0, "does not fit layer 'first'"),
        (("layers", 0, "uses", 0, "groups"), 3, "does not fit layer 'first'"),
        (("layers", 1, "d_in"), 9, "does not fit layer 'table'"),
        (("layers", 2, "geometry", "stride"), [0], "the geometry of layer 'conv' does not fit its 4 inputs"),
        (("layers", 2, "geometry", "padding"), [0], "the geometry of layer 'conv'"),
        (("layers", 2, "geometry", "kernel"), [], "the geometry of layer 'conv'"),
        (("layers", 2, "geometry", "mode"), "mirror", "the padding mode of layer 'conv' is 'mirror'"),
        (("every",), 0, "every is 0; expected at least 1"),
        (("layers", 0, "keep"), "rows", "layer 'first' keeps 'rows', and the store 'slots'"),
        (("layers", 0, "keep"), "all", "keep of layer 'first' is 'all'; expected one of"),
        (("batch_axis",), {"": 99}, "batch_axis names an axis that no tensor has"),
        (("sessions",), [], "its sessions begin at steps"),
        (("sessions", 0, "first_step"), 1, "its sessions begin at steps"),
        (("chunks", 1, "slots"), [8], "chunk 1 is not as expected|does not fit"),
        (("chunks", 1, "shard"), 1, "chunk 1 is not as expected"),
        (("chunks", 1, "first_step"), 1, "chunk 1 has steps 1 to 4; expected them to begin at 2"),
        (("chunks", 1, "end_step"), 2, "chunk 1 has steps 2 to 2"),
        (("chunks", 1, "first_row"), 9, "chunk 1 begins with row 9; there are 8 before it"),
        (("chunks", 1, "files", "rows.parquet", "lines"), 7, "chunk 1 has 8 rows; its table has 7"),
        (("chunks", 1, "files", "steps.parquet", "lines"), 1, "chunk 1 has fewer lines than steps"),
        (("chunks", 1, "files", "rows.parquet", "lines"), None, "rows.parquet has lines, or none"),
        (("chunks", 1, "files", "slots.safetensors", "lines"), 8, "slots.safetensors has lines, or none"),
        (("snapshots", 0, "step"), 1, "no snapshot of the weights that training began with"),
        (("snapshots", 1, "step"), 0, "two of its snapshots are called the same"),
        (("snapshots", 1, "step"), 9, "a snapshot of step 9, but only 8 steps are sealed"),
        (("snapshots", 1, "file", "lines"), 9, "a snapshot has lines"),
        (("totals", "step"), 9, "its totals are of 9 steps, but only 8 are sealed"),
        (("totals", "groupings"), [], "its totals are not as expected"),
        (("totals", "groupings", 0, "kind"), "sums", "the kind of totals is 'sums'"),
        (("totals", "groupings", 0, "columns"), ["task"], "there are totals by .*'task'.*, but no such columns"),
        (("totals", "groupings", 0, "columns"), [], "but no such columns"),
        (("totals", "files", "groups-000.parquet", "lines"), None, "its totals are not as expected: a file has lines"),
    ],
)
def test_what_does_not_fit(whole, tmp_path, path, value, says):
    data = json.loads((whole / MANIFEST).read_text())
    set_at(data, path, value)
    if path[:1] == ("chunks",):
        data["steps"] = data["chunks"][-1]["end_step"]
    write_manifest(tmp_path, data)
    with pytest.raises(ValueError, match=says):
        check_manifest(read_manifest(files_at(tmp_path)))


def test_chunks_of_a_store_that_keeps_totals_only(whole):
    manifest = read_manifest(files_at(whole))
    with pytest.raises(ValueError, match='it keeps "totals", but has chunks'):
        check_manifest(
            replace(manifest, keep="totals", layers=tuple(replace(one, keep="totals") for one in manifest.layers))
        )


def test_tables_may_be_a_hundred_times_as_large_as_the_store(whole, monkeypatch):
    manifest = read_manifest(files_at(whole))
    nbytes = sum(file.size for _, file in manifest.files())
    assert consistency.table_limit(nbytes) == 1 << 30
    assert consistency.table_limit(1 << 40) == 100 << 40
    monkeypatch.setattr(consistency, "TABLE_BYTES", 0)
    check_manifest(manifest)
    monkeypatch.setattr(consistency, "TABLE_SHARE", 0)
    with pytest.raises(ValueError, match=r"its tables have \d+ lines, which [\d,]+ bytes cannot hold"):
        check_manifest(manifest)
