"""Stores that are well-formed but do not fit together are refused, or answer as the original does."""

import json
import shutil

import pytest
from inconsistent import (
    answers,
    linked_copy,
    mutations,
    numbers_in,
    outcome,
    record,
    set_at,
    value_at,
    write_manifest,
)

from dualform.errors import StoreDamagedError
from dualform.record.resuming import EarlierRecording
from dualform.store.files import files_at
from dualform.store.reader import Store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A run that was resumed, the same run before that, and another run, with chunks of the same sizes."""
    folder = tmp_path_factory.mktemp("inconsistent")
    record(folder / "original")
    shutil.copytree(folder / "original", folder / "earlier")
    record(folder / "original", resume=4)
    record(folder / "foreign", seed=1)
    return folder


@pytest.fixture(scope="module")
def expected(stores):
    return answers(stores / "original")


FAMILIES = {
    "steps": 2,
    "sessions": 2,
    "chunks": 150,
    "snapshots": 5,
    "totals": 5,
    "layers": 20,
    "parameters": 10,
    "other": 80,
}
"""The parts of the manifest whose counts are edited, and everything else; with how many mutations there are of each, at least."""


def family(name):
    first = name.split(".")[0].split()[0]
    return first if first in FAMILIES else "other"


@pytest.mark.parametrize("which", list(FAMILIES))
def test_an_inconsistent_store_is_refused_or_answers_as_before(stores, expected, tmp_path, which):
    every = mutations(stores / "original", stores / "foreign", stores / "earlier")
    mine = [mutation for mutation in every if family(mutation.name) == which]
    assert len(mine) >= FAMILIES[which]
    if len(mine) > 100:
        mine = mine[::2]  # fast enough for every day; `make torture` tries many more
    wrong = []
    refused = 0
    for mutation in mine:
        copy = linked_copy(stores / "original", tmp_path / "copy")
        mutation.apply(copy)
        found = outcome(copy, expected)
        refused += found.startswith("refused: StoreDamagedError")
        if not found.startswith(("refused", "same")):
            wrong.append(f"{mutation.name}: {found}")
        shutil.rmtree(copy)
    assert not wrong
    assert refused >= 0.75 * len(mine)


def test_the_originals_are_consistent(stores, expected):
    assert answers(stores / "original") == expected
    for name in ("earlier", "foreign"):
        assert answers(stores / name) != expected


def test_the_counts_of_a_cut_chunk_are_counted(tmp_path):
    """A run resumed in the middle of a chunk leaves the chunk's files as they are: only a part of them counts."""
    folder = tmp_path / "run"
    record(folder)
    data = json.loads(EarlierRecording(files_at(folder), 7).manifest.dump())
    write_manifest(folder, data)
    store = Store(files_at(folder))
    assert [(chunk.first_step, chunk.end_step) for chunk in store.manifest.chunks] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert store.rows.height == 28
    expected = answers(folder)
    paths = [path for path in numbers_in(data["chunks"][-1]) if path[0] in ("rows", "slots", "keys")]
    assert len(paths) == 9
    for path in paths:
        for added in (1, -1):
            changed = json.loads(json.dumps(data))
            last = changed["chunks"][-1]
            set_at(last, path, value_at(last, path) + added)
            write_manifest(folder, changed)
            assert outcome(folder, expected).startswith("refused: StoreDamagedError"), (path, added)
    write_manifest(folder, data)
    assert answers(folder) == expected


def test_messages_say_which_file_and_why(stores, tmp_path):
    said = {
        "foreign chunk 0": r"chunk-000000/\S+ is not the file that the manifest names: it belongs to another run",
        "swap chunks 0 and 1, settled": r"it was written as 'chunk-00000\d/",
        "dropped chunk 2": "it is of steps that were dropped when the run was resumed",
        "drop chunk 0": r"manifest of \S+ is damaged: chunk 0 has steps 2 to 4; expected them to begin at 0",
        "chunks.3.rows +1": "it was written with rows = 8, the manifest says 9|its table has 8",
        "steps +1": "it says that 9 steps are sealed, but its chunks hold 8",
        "layers.3.d_in -1": "does not fit layer 'head'",
    }
    found = {
        mutation.name: mutation
        for mutation in mutations(stores / "original", stores / "foreign", stores / "earlier")
        if mutation.name in said
    }
    assert found.keys() == said.keys()
    for name, pattern in said.items():
        copy = linked_copy(stores / "original", tmp_path / name.replace(" ", "-"))
        found[name].apply(copy)
        with pytest.raises(StoreDamagedError, match=pattern):
            answers(copy)
