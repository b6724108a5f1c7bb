import json
from dataclasses import replace

import pytest

from dualform.errors import StoreDamagedError, StoreMissingError, StoreVersionError
from dualform.store.files import files_at
from dualform.store.format import (
    MANIFEST,
    VERSION,
    Chunk,
    Column,
    File,
    Manifest,
    Parameter,
    Snapshot,
    checksum,
    chunk_name,
    read_manifest,
    snapshot_name,
)
from training import linear


@pytest.fixture
def manifest():
    return Manifest(
        version=VERSION,
        created_by="a test",
        keep="slots",
        dtype="float32",
        layers=(linear("a", 3, 2, "a.weight", "a.bias"), linear("b", 2, 1, "b.weight")),
        parameters=(Parameter("a.weight", (2, 3), "float32"),),
        left_out={"c": "its weight is shared"},
        batch_axis={"a": 1},
        columns=(Column("label", "Int64", "row"),),
        chunks=(
            Chunk(
                first_step=0,
                end_step=3,
                first_row=0,
                rows=12,
                slots=(12, 0),
                keys=(9, 0),
                files={"slots.safetensors": File(10, "ab")},
            ),
        ),
        snapshots=(Snapshot(0, File(3, "cd")),),
        ended="closed",
    )


def save(folder, manifest, **changes):
    """Write a manifest, with some fields changed and a checksum that fits."""
    data = {**json.loads(manifest.dump()), **changes}
    data.pop("checksum")
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    (folder / MANIFEST).write_text(json.dumps({**data, "checksum": checksum(canonical)}))


def test_a_manifest_is_read_back_as_it_was_written(tmp_path, manifest):
    (tmp_path / MANIFEST).write_bytes(manifest.dump())
    assert read_manifest(files_at(tmp_path)) == manifest
    assert manifest.end_step == 3


def test_texts_in_any_script_come_back(tmp_path, manifest):
    named = replace(manifest, left_out={'é\n"x': "層 \u2028 \\"})
    (tmp_path / MANIFEST).write_bytes(named.dump())
    assert read_manifest(files_at(tmp_path)) == named


def test_the_number_of_steps_is_written_down_twice(tmp_path, manifest):
    """So that a chunk that is missing at the end is noticed."""
    for steps in (2, 4, True, None, "3"):
        save(tmp_path, manifest, steps=steps)
        with pytest.raises(StoreDamagedError, match=r"it says that .* steps are sealed, but its chunks hold 3"):
            read_manifest(files_at(tmp_path))
    save(tmp_path, manifest, steps=3)
    assert read_manifest(files_at(tmp_path)) == manifest


def test_every_run_and_session_has_a_name_of_its_own(manifest):
    first, second = manifest.with_session(), manifest.with_session()
    assert first.run == second.run
    assert first.sessions != second.sessions
    fields = {name: value for name, value in vars(manifest).items() if name != "run"}
    assert Manifest(**fields).run != Manifest(**fields).run


def test_sessions_of_a_resumed_run(manifest):
    [chunk] = manifest.chunks

    def until(manifest, step):
        return replace(manifest, chunks=(replace(chunk, end_step=step),) if step else ())

    begun = until(manifest, 0).with_session()
    resumed = until(begun, 3).with_session()
    again = until(resumed, 2).with_session()
    assert [session.first_step for session in again.sessions] == [0, 2]
    assert again.session_of(1) == begun.sessions[0].name
    assert again.session_of(2) == again.sessions[-1].name
    assert again.sessions_at(2) == {session.name for session in again.sessions}
    assert resumed.session_of(9) == resumed.sessions[-1].name != again.sessions[-1].name
    assert [session.first_step for session in until(again, 0).with_session().sessions] == [0, 0]
    twice = until(again, 2).with_session()  # the first of these two may have written the snapshot of step 2
    assert twice.sessions_at(2) == {session.name for session in twice.sessions}
    assert twice.session_of(2) == twice.sessions[-1].name


def test_files_by_their_paths(manifest):
    assert [name for name, _ in manifest.files()] == [
        "chunk-000000/slots.safetensors",
        "snapshot-000000000.safetensors",
    ]


def test_unknown_path(tmp_path):
    with pytest.raises(StoreMissingError, match=r"nowhere holds no recording: there is no such folder"):
        read_manifest(files_at(tmp_path / "nowhere"))


def test_a_folder_without_a_manifest(tmp_path):
    with pytest.raises(StoreMissingError, match=rf"it has no {MANIFEST}.*dualform\.record\(\)"):
        read_manifest(files_at(tmp_path))


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("hello")
    with pytest.raises(StoreMissingError, match="expected a folder"):
        read_manifest(files_at(tmp_path / "file"))


@pytest.mark.parametrize("text", ["", "no JSON", "{", "[" * 100_000, '"\ud800"'.encode("utf-8", "surrogatepass")])
def test_what_is_no_json(tmp_path, text):
    (tmp_path / MANIFEST).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StoreDamagedError, match=MANIFEST):
        read_manifest(files_at(tmp_path))


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"format": "zarr"}', '{"name": "a web page", "version": 3}'])
def test_a_foreign_manifest(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(StoreDamagedError, match=rf"{MANIFEST} is no dualform manifest"):
        read_manifest(files_at(tmp_path))


def test_a_newer_version_says_so_before_anything_else(tmp_path, manifest):
    save(tmp_path, manifest, version=VERSION + 1, layers="in a form of the future")
    with pytest.raises(StoreVersionError, match=rf"format {VERSION + 1}.*reads up to {VERSION}.*Upgrade"):
        read_manifest(files_at(tmp_path))


def test_an_older_version_says_to_record_again(tmp_path, manifest):
    save(tmp_path, manifest, version=VERSION - 1, layers="in a form of the past")
    with pytest.raises(StoreVersionError, match=rf"format {VERSION - 1}.*reads only format {VERSION}.*Record .* again"):
        read_manifest(files_at(tmp_path))


def test_an_altered_byte(tmp_path, manifest):
    altered = manifest.dump().replace(b'"rows":12', b'"rows":13')
    assert altered != manifest.dump()
    (tmp_path / MANIFEST).write_bytes(altered)
    with pytest.raises(StoreDamagedError, match=rf"{MANIFEST} is damaged: its checksum does not fit"):
        read_manifest(files_at(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", "none"),
        ("layers", [{"name": "a"}]),
        ("keep", 3),
        ("chunks", [{"first_step": -1}]),
        ("left_out", []),
        ("version", "1"),
        ("version", None),
        ("surprise", 1),
        ("run", None),
        ("sessions", [{"name": "a", "first_step": 2**53}]),
        ("batch_axis", {"a": True}),
        ("batch_axis", {"a": -1}),
        ("batch_axis", {"a": 1.0}),
        ("ended", "\ud800"),
        ("left_out", {"\udfff": "a reason"}),
    ],
)
def test_fields_of_the_wrong_kind(tmp_path, manifest, field, value):
    save(tmp_path, manifest, **{field: value})
    with pytest.raises(StoreDamagedError, match=rf"{MANIFEST} is damaged"):
        read_manifest(files_at(tmp_path))


@pytest.mark.parametrize("field", ["layers", "run", "inexact", "columns", "sessions", "totals"])
def test_a_missing_field(tmp_path, manifest, field):
    data = json.loads(manifest.dump())
    del data[field], data["checksum"]
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    (tmp_path / MANIFEST).write_text(json.dumps({**data, "checksum": checksum(canonical)}))
    with pytest.raises(StoreDamagedError, match=rf"Manifest is not as expected \(missing: {field}; unknown: nothing\)"):
        read_manifest(files_at(tmp_path))


def test_names_sort_like_their_numbers():
    assert sorted([chunk_name(10), chunk_name(9)]) == [chunk_name(9), chunk_name(10)]
    assert sorted([snapshot_name(100), snapshot_name(99)]) == [snapshot_name(99), snapshot_name(100)]
