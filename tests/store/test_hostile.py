"""Manifests and tables that somebody has made up: refused with a store error, in bounded time and memory."""

import json
import os
import resource
import shutil
import signal
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from inconsistent import (
    answers,
    edit,
    file_entry,
    linked_copy,
    network,
    numbers_in,
    outcome,
    record,
    refer,
    set_at,
    write_anew,
    write_manifest,
)
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.errors import DualformError, InexactWarning, StoreDamagedError, StoreError
from dualform.store import consistency
from dualform.store.files import LocalFiles
from dualform.store.format import MANIFEST, File, checksum
from dualform.store.tables import write_table
from dualform.store.tensors import ArrayFile, write_tensors

SECONDS = 120
MEMORY = 1 << 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "whole"
    record(folder)
    return folder


@pytest.fixture(scope="module")
def expected(whole):
    return answers(whole)


@pytest.fixture(scope="module")
def expected_with_notes(whole, tmp_path_factory):
    """The same, of a store with notes of every kind."""
    folder = linked_copy(whole, tmp_path_factory.mktemp("notes") / "run")
    edit(folder, add_notes)
    return quietly(answers, folder)


def add_notes(data):
    data["inexact"] = {"head": {"step": 7, "why": "a test"}}
    data["batch_axis"] = {"": 0}


def quietly(ask, *given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)
        return ask(*given)


@pytest.fixture
def store(whole, tmp_path):
    return linked_copy(whole, tmp_path / "run")


@pytest.fixture(autouse=True)
def bounded():
    """A hang and a large allocation are errors."""

    def hang(*_):
        raise TimeoutError("a hang")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


# The manifest

VALUES = [0, -1, 2**31, 2**40, 2**53, 2**63, 10**300, 1e308, float("nan"), None, "7", True, [], {}]


NOTES = ("rows", "inexact", "batch_axis", "every")
"""What the recorder noted down: questions to a store with other numbers may be refused for what these say, before any damage is seen."""


def test_any_value_in_the_place_of_any_number(store, expected_with_notes):
    data = json.loads((store / MANIFEST).read_text())
    add_notes(data)
    paths = list(numbers_in(data))
    assert len(paths) > 120
    wrong = []
    for place, path in enumerate(paths):
        for value in VALUES[place % 2 :: 2]:  # every second one, in turns: fast enough for every day
            changed = json.loads(json.dumps(data))
            set_at(changed, path, value)
            write_manifest(store, changed)
            if path[0] in NOTES:
                quietly(ask_anything, store)
                continue
            found = quietly(outcome, store, expected_with_notes)
            if not found.startswith(("refused", "same")):
                wrong.append(f"{path} = {value!r}: {found}")
    assert not wrong


def ask_anything(folder):
    """Questions to a store with other notes are answered, or refused with an error of ours."""
    with suppress(DualformError):
        answers(folder)


FIELDS = [
    ("layers", 0, "d_in"),
    ("layers", 0, "d_out"),
    ("layers", 2, "geometry", "stride", 0),
    ("layers", 2, "geometry", "kernel", 0),
    ("layers", 2, "uses", 0, "groups"),
    ("parameters", 0, "shape", 0),
    ("chunks", 0, "rows"),
    ("chunks", 3, "rows"),
    ("chunks", 3, "end_step"),
    ("chunks", 0, "slots", 0),
    ("chunks", 0, "keys", 0),
    ("chunks", 0, "files", "rows.parquet", "lines"),
    ("snapshots", 1, "step"),
    ("totals", "number"),
    ("totals", "files", "groups-000.parquet", "lines"),
]


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("value", [2**40, 2**60])
@pytest.mark.parametrize("command", ["info", "verify"])
def test_huge_numbers_are_one_line_on_the_command_line(store, path, value, command):
    edit(store, lambda data: set_at(data, path, value))
    found = call(command, store)
    assert found.exit_code == 2, found.output
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1
    assert isinstance(found.exception, SystemExit)


@pytest.mark.parametrize("depth", [3, 100, 900, 990, 5_000, 200_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_nesting(store, depth, brackets):
    """Deep enough for the parser, or only for what comes after it. The checksum fits."""
    opening = "[" if brackets == "[]" else '{"a":'
    nested = opening * depth + "1" + brackets[1] * depth
    data = json.loads((store / MANIFEST).read_text())
    data.pop("checksum")
    for field in ("settings", "layers", "keep", "surprise"):
        marked = {**data, field: "NESTED"}
        canonical = json.dumps(marked, sort_keys=True, separators=(",", ":")).replace('"NESTED"', nested)
        text = json.dumps({**marked, "checksum": checksum(canonical.encode())}).replace('"NESTED"', nested)
        write_anew(store / MANIFEST, text.encode())
        with pytest.raises(StoreError):
            dualform.open(store)


@pytest.mark.parametrize("number", ["9" * 4000, "9" * 100_000, "1e400", "-1e400", "Infinity", "NaN", "-0", "00"])
def test_numbers_that_are_none(store, number):
    text = (store / MANIFEST).read_text().replace('"d_in": 8', f'"d_in": {number}', 1)
    assert number in text
    write_anew(store / MANIFEST, text.encode())
    with pytest.raises(StoreError):
        dualform.open(store)


def test_a_manifest_of_a_terabyte(store):
    write_anew(store / MANIFEST, b"{")
    os.truncate(store / MANIFEST, 1 << 40)
    with pytest.raises(StoreDamagedError, match="more than"):
        dualform.open(store)


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"])
def test_names_that_cannot_be_printed(store, name):
    edit(store, lambda data: data["layers"][0].update(name=name))
    found = call("info", store)
    assert found.exit_code == 2
    assert "no text that can be printed" in found.stderr


# Tables


@pytest.fixture
def unread(monkeypatch):
    """No table may be decoded."""

    def refuse(*_, **__):
        raise AssertionError("the table was read")

    monkeypatch.setattr("dualform.store.catalog.pl.read_parquet", refuse)


def labelled(path, table):
    """Write a table with the label of the file that it replaces."""
    label = pl.read_parquet_metadata(path)["dualform"]
    path.unlink()
    write_table(LocalFiles(path.parent), path.name, table, label)


@pytest.mark.parametrize("name", ["rows", "updates", "steps"])
def test_more_lines_than_the_manifest_says_are_not_read(store, unread, name):
    path = store / f"chunk-000000/{name}.parquet"
    lines = file_entry(path)["lines"]
    labelled(path, pl.DataFrame({"step": np.zeros(1_000_000, np.int64)}))

    def change(data):
        refer(store, data)
        data["chunks"][0]["files"][path.name]["lines"] = lines

    edit(store, change)
    opened = dualform.open(store).store
    with pytest.raises(
        StoreDamagedError, match=rf"{name}\.parquet is damaged: it has 1,000,000 lines, the manifest says"
    ):
        {"rows": opened.rows_in, "updates": opened.updates_in, "steps": lambda _: opened.log}[name](0)


def test_a_small_file_of_a_hundred_million_lines_is_refused_when_the_store_is_opened(store):
    """All counts agree, but no honest recording has so many rows in so few bytes."""

    def change(data):
        data["chunks"][3]["rows"] = data["chunks"][3]["files"]["rows.parquet"]["lines"] = 150_000_000

    edit(store, change)
    with pytest.raises(StoreDamagedError, match=r"its tables have 150,000,\d+ lines, which [\d,]+ bytes cannot hold"):
        dualform.open(store)


def test_a_table_that_would_take_too_much_memory_is_not_read(store, unread, monkeypatch):
    """Few lines, but long lists."""
    monkeypatch.setattr(consistency, "TABLE_BYTES", 1 << 20)
    path = store / "chunk-000000/rows.parquet"
    rows = pl.DataFrame({"step": [0] * 8, "tokens": [[0] * 100_000] * 8})
    labelled(path, rows)
    edit(store, lambda data: refer(store, data))
    with pytest.raises(StoreDamagedError, match="bytes of memory"):
        dualform.open(store).store.rows_in(0)


def test_long_tables_of_an_honest_store_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(consistency, "TABLE_BYTES", 1 << 14)
    folder = tmp_path / "run"
    record(folder, steps=40, rows=8)
    assert dualform.open(folder).rows.height == 320
    assert answers(folder)


@pytest.mark.parametrize("name", ["rows", "updates", "steps"])
@pytest.mark.parametrize("change", ["other steps", "no steps", "another type", "another column", "nulls", "unsorted"])
def test_tables_that_do_not_fit_are_refused(store, name, change):
    path = store / f"chunk-000001/{name}.parquet"
    table = pl.read_parquet(path)
    if change == "another column":
        table = table.with_columns(pl.lit("surprise").alias("surprise"))
    else:
        steps = {
            "other steps": pl.col("step") + 100,
            "another type": pl.col("step").cast(pl.Float64),
            "nulls": pl.when(pl.int_range(pl.len()) == 1).then(None).otherwise(pl.col("step")).alias("step"),
            "unsorted": pl.col("step").reverse(),
        }
        table = table.drop("step") if change == "no steps" else table.with_columns(steps[change])
    labelled(path, table)
    edit(store, lambda data: refer(store, data))
    opened = dualform.open(store).store
    with pytest.raises(StoreDamagedError, match=rf"chunk-000001/{name}\.parquet is damaged"):
        {"rows": opened.rows_in, "updates": opened.updates_in, "steps": lambda _: opened.log}[name](1)


def test_what_polars_cannot_read_is_damaged(store, monkeypatch):
    def fail(*_, **__):
        raise pl.exceptions.ComputeError("a page is not as expected")

    monkeypatch.setattr("dualform.store.catalog.pl.read_parquet", fail)
    with pytest.raises(StoreDamagedError, match=r"rows\.parquet is damaged: Polars cannot read it \(a page"):
        dualform.open(store).store.rows_in(0)


# Tensors: headers and content that fit their checksums


def rewrite(store, name, change):
    """Change the tensors of a file, and correct all checksums."""
    path = store / name
    entry = file_entry(path)
    file = ArrayFile(LocalFiles(path.parent), path.name, File(entry["size"], entry["checksum"]))
    tensors = {tensor: np.array(file[tensor]) for tensor in file}
    label = file.label
    change(tensors)
    path.unlink()
    write_tensors(LocalFiles(path.parent), path.name, {tensor: [array] for tensor, array in tensors.items()}, label)
    edit(store, lambda data: refer(store, data))


def shortened(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def with_entry(name, place, value):
    def change(tensors):
        tensors[name][place] = value

    return change


TENSORS = {
    "a key fewer": shortened("0.keys"),
    "an error signal fewer": shortened("0.errors"),
    "a key number fewer": shortened("0.key_numbers"),
    "a block fewer": shortened("0.blocks"),
    "a gradient fewer": shortened("gradient.1"),
    "a map fewer": shortened("2.keys"),
    "a shape fewer": shortened("2.shapes"),
    "no keys": lambda tensors: tensors.pop("0.keys"),
    "no blocks": lambda tensors: tensors.pop("3.blocks"),
    "no errors": lambda tensors: tensors.pop("3.errors"),
    "narrow keys": lambda tensors: tensors.update({"0.keys": tensors["0.keys"][:, :-1]}),
    "wide keys": lambda tensors: tensors.update({"0.keys": tensors["0.keys"].astype(np.float64)}),
    "exponents": lambda tensors: tensors.update({"0.key_exponents": np.zeros(len(tensors["0.keys"]), np.int16)}),
    "a key number that is not there": with_entry("0.key_numbers", 0, 10**6),
    "a negative key number": with_entry("0.key_numbers", 0, -1),
    "a huge key number": with_entry("0.key_numbers", 0, 2**62),
    "a place that is not there": with_entry("1.keys", 0, 8),
    "a row that is not there": with_entry("0.blocks", (0, 3), 10**6),
    "a negative row": with_entry("0.blocks", (0, 3), -2),
    "more rows": with_entry("0.blocks", (0, 4), 10**6),
    "negative rows": with_entry("0.blocks", (0, 4), -4),
    "rows that overflow": with_entry("0.blocks", (0, 4), 2**62),
    "positions that overflow": with_entry("0.blocks", (0, 5), 2**62),
    "a step of another chunk": with_entry("0.blocks", (0, 0), 99),
    "a huge step": with_entry("0.blocks", (1, 0), 2**62),
    "steps out of order": lambda tensors: tensors.update({"0.blocks": tensors["0.blocks"][::-1].copy()}),
    "more maps": with_entry("2.shapes", (0, 0), 9),
    "larger maps": with_entry("2.shapes", (0, 1), 9),
    "huge maps": with_entry("2.shapes", (0, 1), 2**62),
}


@pytest.mark.parametrize("name", list(TENSORS))
def test_tensors_that_do_not_fit_their_counts(store, expected, name):
    """Whoever can write checksums can write any numbers, but nothing that breaks the reader."""
    rewrite(store, "chunk-000001/slots.safetensors", TENSORS[name])
    found = outcome(store, expected)
    assert found.startswith("refused: StoreDamagedError"), found
    assert "chunk-000001/slots.safetensors" in found


@pytest.mark.parametrize("name", ["snapshot-000000000.safetensors", "snapshot-000000008.safetensors"])
def test_a_snapshot_of_another_shape(store, expected, name):
    rewrite(store, name, lambda tensors: tensors.update({"model.head.weight": tensors["model.head.weight"][:, :-1]}))
    found = outcome(store, expected)
    assert "'model.head.weight' is of shape (3, 2), the manifest says (3, 3)" in found


@pytest.mark.parametrize("tensor", ["0.0.keys", "0.0.visits", "0.p0.weight", "0.p1.weight.rest"])
def test_totals_of_another_shape(store, expected, tensor):
    def lengthen(tensors):
        tensors[tensor] = np.concatenate([tensors[tensor]] * 9)

    [path] = store.glob("totals-*/totals.safetensors")
    rewrite(store, path.relative_to(store), lengthen)
    found = outcome(store, expected)
    assert f"{tensor!r} does not fit the manifest" in found


def test_a_header_that_claims_more_than_the_file(store):
    """Huge shapes and lengths are refused before anything is allocated."""
    path = store / "chunk-000000/slots.safetensors"
    original = path.read_bytes()
    for shape in (
        [2**40, 8],
        [2**62, 2**62],
        [2**31, 2**31, 2**31],
        [1] * 10_000,
        [10**300],
        [-1, 8],
        [1.5],
        [None],
        "8",
    ):
        header = json.dumps({"0.keys": {"dtype": "F32", "shape": shape, "data_offsets": [0, 64]}}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(64)
        write_anew(path, content)
        entry = {"size": len(content), "checksum": checksum(content[: 8 + len(header)]), "lines": None}
        edit(store, lambda data, entry=entry: data["chunks"][0]["files"].update({path.name: entry}))
        with pytest.raises(StoreDamagedError, match=r"slots\.safetensors is damaged"):
            dualform.open(store).attend({"first": torch.zeros(1, 8)})["first"].top(1)
    write_anew(path, original)
    entry = file_entry(path)
    edit(store, lambda data: data["chunks"][0]["files"].update({path.name: entry}))
    write_anew(path, (2**63).to_bytes(8, "little") + original[8:])
    with pytest.raises(StoreDamagedError, match="checksum of its header"):
        dualform.open(store).attend({"first": torch.zeros(1, 8)})["first"].top(1)


def test_curvature_that_was_made_up(store, whole):
    """It is no part of the store, but it is read from the same folder."""
    dual = dualform.open(store, network())
    dual.influence(torch.tensor([1]), segments=1)
    kept = sorted(store.glob("curvature-*"))
    assert kept
    for path in kept:
        write_anew(path, (2**62).to_bytes(8, "little") + bytes(100))
    with pytest.raises(StoreDamagedError, match="curvature-"):
        dualform.open(store, network()).influence(torch.tensor([1]), segments=1)
    for path in kept:
        shutil.copy(store / "snapshot-000000000.safetensors", path)
    with pytest.raises(StoreDamagedError, match="Delete it"):
        dualform.open(store, network()).influence(torch.tensor([1]), segments=1)
