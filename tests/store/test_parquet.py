"""What a Parquet file says about itself, honest, damaged or lying."""

import io
import random

import numpy as np
import polars as pl
import pytest

from dualform.store import parquet
from dualform.store.parquet import (
    BINARY,
    FILE_GROUPS,
    FILE_ROWS,
    GROUP_COLUMNS,
    GROUP_ROWS,
    I64,
    LIST,
    STRUCT,
    describe,
)


def written(table, **settings):
    buffer = io.BytesIO()
    table.write_parquet(buffer, compression="zstd", statistics=False, metadata={"dualform": "label é"}, **settings)
    return buffer.getvalue()


TABLE = pl.DataFrame(
    {
        "step": np.arange(50) // 5,
        "name": [f"é{n % 7}" for n in range(50)],
        "flag": [n % 2 == 0 for n in range(50)],
        "missing": [None if n % 3 else float(n) for n in range(50)],
        "tokens": [list(range(n % 4)) for n in range(50)],
    }
)


@pytest.mark.parametrize("table", [TABLE, TABLE[:1], TABLE[:0], TABLE.select("step")])
@pytest.mark.parametrize("group", [None, 16])
def test_lines_and_metadata(table, group):
    found = describe(written(table, row_group_size=group))
    assert found.lines == table.height
    assert found.metadata["dualform"] == "label é"
    # a copy, since Polars 1.33 counts the whole column for a slice of lists
    copied = pl.DataFrame(table.to_dict(as_series=False), schema=table.schema)
    assert found.nbytes >= copied.estimated_size() or not table.height


def test_memory_is_bounded_from_above_without_decoding():
    constant = pl.DataFrame(
        {"step": np.zeros(1_000_000, np.int64), "task": pl.repeat("x" * 200, 1_000_000, eager=True)}
    )
    data = written(constant)
    assert len(data) < 100_000
    assert describe(data).nbytes >= 16_000_000


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + bytes(100), bytes(100), b"PAR1\xff\xff\xff\xffPAR1"]
)
def test_what_is_no_parquet(data):
    with pytest.raises(ValueError, match="it is no Parquet file"):
        describe(data)


def test_every_cut_is_noticed():
    data = written(TABLE)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"\w"):
            describe(data[:length])


def test_any_damage_is_a_value_error_or_harmless():
    data = written(TABLE)
    draw = random.Random(0)
    refused = 0
    for _ in range(3000):
        place = draw.randrange(len(data))
        damaged = data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
        try:
            describe(damaged)
        except ValueError:
            refused += 1
    assert refused > 500


# Files that lie: their footers are taken apart, changed and put together again


def varint(value):
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def encoded(value):
    """A value of a structure: (type, bytes) in the compact protocol."""
    if isinstance(value, int):
        return I64, varint(value << 1 if value >= 0 else (-value << 1) - 1)
    if isinstance(value, bytes):
        return BINARY, varint(len(value)) + value
    if isinstance(value, dict):
        fields = b""
        for number, field in value.items():
            kind, content = encoded(field)
            fields += bytes([kind]) + varint(number << 1) + content
        return STRUCT, fields + b"\0"
    elements = [encoded(element) for element in value]
    kind = elements[0][0] if elements else I64
    return LIST, bytes([0xF0 | kind]) + varint(len(elements)) + b"".join(content for _, content in elements)


def taken_apart(data):
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data[:begin], parquet._Thrift(data, begin, len(data) - 8).read()


def put_together(pages, footer):
    _, content = encoded(footer)
    return pages + content + len(content).to_bytes(4, "little") + b"PAR1"


def numbers_only(footer):
    """The parts of a footer that we read: whole numbers of any length are enough to write them."""
    groups = [
        {
            GROUP_COLUMNS: [{3: {n: c[3][n] for n in (3, 5, 7, 9, 11) if n in c[3]}} for c in group[GROUP_COLUMNS]],
            GROUP_ROWS: group[GROUP_ROWS],
        }
        for group in footer[FILE_GROUPS]
    ]
    return {FILE_ROWS: footer[FILE_ROWS], FILE_GROUPS: groups}


@pytest.fixture
def apart():
    pages, footer = taken_apart(written(TABLE))
    return pages, numbers_only(footer)


def test_a_footer_can_be_taken_apart_and_put_together(apart):
    assert describe(put_together(*apart)) == parquet.Described(50, {}, describe(written(TABLE)).nbytes)


@pytest.mark.parametrize("lines", [0, 49, 51, 150_000_000, 2**60, -1])
def test_more_or_fewer_lines_than_there_are(apart, lines):
    pages, footer = apart
    footer[FILE_ROWS] = lines
    with pytest.raises(ValueError, match=r"lines|makes no sense"):
        describe(put_together(pages, footer))


@pytest.mark.parametrize("lines", [8, 150_000_000])
def test_pages_that_hold_another_number_of_values_than_the_footer_says(apart, lines):
    """Polars would decode the pages: what they hold counts, not the footer."""
    pages, footer = apart
    footer[FILE_ROWS] = lines
    [group] = footer[FILE_GROUPS]
    group[GROUP_ROWS] = lines
    for column in group[GROUP_COLUMNS]:
        column[3][5] = lines
    with pytest.raises(ValueError, match="its pages have 50"):
        describe(put_together(pages, footer))


@pytest.mark.parametrize("field", [5, 7, 9, 11])
@pytest.mark.parametrize("value", [-1, 0, 3, 10**6, 2**62])
def test_columns_that_are_elsewhere(apart, field, value):
    pages, footer = apart
    column = footer[FILE_GROUPS][0][GROUP_COLUMNS][0][3]
    if field not in column:
        pytest.skip("old versions of Polars do not write where the dictionary is")
    if column[field] == value:
        pytest.skip("no change")
    column[field] = value
    with pytest.raises(ValueError, match=r"\w"):
        describe(put_together(pages, footer))


def test_a_dictionary_behind_the_data_of_its_column(apart):
    """Polars starts reading at the dictionary, so that the pages that were counted would not be those that it decodes."""
    pages, footer = apart
    first, *_, last = footer[FILE_GROUPS][0][GROUP_COLUMNS]
    first[3].pop(11, None)
    first[3][11] = last[3][9]
    with pytest.raises(ValueError, match="lies behind its data"):
        describe(put_together(pages, footer))


def test_structures_inside_one_another(apart):
    pages, footer = apart
    nested = {1: 0}
    for _ in range(100):
        nested = {1: nested}
    with pytest.raises(ValueError, match="nested too deeply"):
        describe(put_together(pages, {**footer, 99: nested}))


def test_a_list_that_claims_to_be_endless(apart):
    pages, _ = apart
    content = bytes([LIST]) + varint(FILE_GROUPS << 1) + bytes([0xF0 | STRUCT]) + varint(2**60) + b"\0"
    with pytest.raises(ValueError, match="longer than the footer"):
        describe(pages + content + len(content).to_bytes(4, "little") + b"PAR1")
