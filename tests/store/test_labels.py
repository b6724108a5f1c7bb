"""Labels say which run and place a file belongs to."""

import json

import pytest

from dualform.store.format import VERSION, Chunk, Grouping, Manifest, Parameter, Totals
from dualform.store.labels import Labels, chunk_about, require_chunk, require_equal, require_session, totals_about
from training import linear


def make(layers=2, **changes):
    every = (linear("a", 3, 2, "a.weight"), linear("b", 2, 1, "b.weight"))
    given = {
        "version": VERSION,
        "created_by": "a test",
        "keep": "slots",
        "dtype": "float32",
        "layers": every[:layers],
        "parameters": (Parameter("a.weight", (2, 3), "float32"), Parameter("b.weight", (1, 2), "float32"))[:layers],
        "left_out": {},
        "batch_axis": {},
        "run": "the run",
        **changes,
    }
    return Manifest(**given).with_session()


CHUNK = Chunk(first_step=4, end_step=8, first_row=40, rows=40, slots=(40, 20), keys=(10, 20), files={})
ABOUT = chunk_about(CHUNK, [40, 20], [25, 20])


def test_a_label_is_read_as_it_was_written():
    labels = Labels(make())
    text = labels.write("chunk-000001/rows.parquet", ABOUT)
    label = labels.read(text, "chunk-000001/rows.parquet")
    assert require_chunk(label, ABOUT) == ABOUT
    assert label["run"] == "the run"


@pytest.mark.parametrize(
    ("other", "name", "says"),
    [
        ({"run": "another"}, "rows", "it belongs to another run"),
        ({}, "steps", "it was written as 'rows'"),
        ({"dtype": "float64"}, "rows", "it was written for other layers or parameters"),
        ({"keep": "keys"}, "rows", "it was written for other layers or parameters"),
        ({"parameters": (Parameter("a.weight", (3, 2), "float32"),) * 2}, "rows", "for other layers or parameters"),
        ({"layers": 1}, "rows", "it was written for more layers or parameters than the manifest has"),
    ],
)
def test_labels_of_other_files(other, name, says):
    text = Labels(make()).write("rows", {})
    with pytest.raises(ValueError, match=says):
        Labels(make(**other)).read(text, name)


@pytest.mark.parametrize("text", [None, "", "7", "[]", "{", "[" * 100_000])
def test_what_is_no_label(text):
    with pytest.raises(ValueError, match="does not say which run it belongs to"):
        Labels(make()).read(text, "rows")


def test_a_layer_that_entered_later_has_nothing_in_earlier_chunks():
    text = Labels(make(layers=1)).write("rows", chunk_about(CHUNK, [40], [25]) | {"slots": [40], "keys": [10]})
    label = Labels(make(layers=2)).read(text, "rows")
    padded = {**ABOUT, "first_slots": [40, 0], "first_keys": [25, 0], "slots": [40, 0], "keys": [10, 0]}
    assert require_chunk(label, padded) == padded
    with pytest.raises(ValueError, match="first_slots"):
        require_chunk(label, ABOUT)


@pytest.mark.parametrize("field", list(ABOUT))
@pytest.mark.parametrize("added", [1, -1])
def test_every_count_must_be_the_one_that_was_written(field, added):
    value = ABOUT[field]
    changed = [value[0] + added, *value[1:]] if isinstance(value, list) else value + added
    if (field, added) == ("end_step", -1):
        assert require_chunk(ABOUT, {**ABOUT, field: changed}) == ABOUT  # as a resumed run would cut it
        return
    with pytest.raises(ValueError, match=f"it was written with {field} = "):
        require_chunk(ABOUT, {**ABOUT, field: changed})


def test_a_chunk_that_was_cut_has_less_of_everything():
    cut = {**ABOUT, "end_step": 6, "rows": 20, "slots": [20, 10], "keys": [10, 10]}
    assert require_chunk(ABOUT, cut) == ABOUT
    for field, value in {"rows": 41, "slots": [41, 10], "keys": [10, 21], "first_row": 41}.items():
        with pytest.raises(ValueError, match=f"it was written with {field} = "):
            require_chunk(ABOUT, {**cut, field: value})


@pytest.mark.parametrize("missing", list(ABOUT))
@pytest.mark.parametrize("value", [None, "7", [], {}, -1])
def test_labels_that_somebody_has_made_up(missing, value):
    for end_step in (8, 6):
        with pytest.raises(ValueError, match="it was written with"):
            require_chunk({**ABOUT, missing: value}, {**ABOUT, "end_step": end_step})


def test_totals_and_sessions():
    about = totals_about(Totals(3, 8, 80, (Grouping(("label",), "both"),), {}))
    label = json.loads(Labels(make()).write("totals", about))
    require_equal(label, about)
    with pytest.raises(ValueError, match="it was written with rows = 80, the manifest says 81"):
        require_equal(label, {**about, "rows": 81})
    require_session(label, [label["session"], "another"])
    with pytest.raises(ValueError, match="dropped when the run was resumed"):
        require_session(label, ["another"])
