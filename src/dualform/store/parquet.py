"""What a Parquet file says about itself, read without decoding any data: lines, metadata, and how much memory it would take.

A file of a megabyte can stand for gigabytes (runs, dictionaries, compression), so this is asked before Polars reads it. The footer and
the headers of pages are Thrift structures in the compact protocol; field numbers are those of parquet.thrift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAGIC = b"PAR1"
VALUE_BYTES = 16
"""Memory for a decoded value, at most, beside the bytes of a text: numbers take 8, views of texts 16."""
FOOTER_BYTES = 16 << 20
"""The size of a footer, at most: a column of a quarter of a million lines takes about 150 bytes of it."""
DEPTH = 12
"""Thrift structures inside one another, at most; those of Parquet need 6."""

# Types of the compact protocol
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

# FileMetaData, RowGroup, ColumnChunk, ColumnMetaData, PageHeader
FILE_ROWS, FILE_GROUPS, FILE_METADATA = 3, 4, 5
GROUP_COLUMNS, GROUP_ROWS = 1, 3
CHUNK_PATH, CHUNK_COLUMN = 1, 3
COLUMN_PATH, COLUMN_VALUES, COLUMN_COMPRESSED, COLUMN_DATA, COLUMN_DICTIONARY = 3, 5, 7, 9, 11
PAGE_UNCOMPRESSED, PAGE_COMPRESSED, PAGE_DATA, PAGE_DATA_V2 = 2, 3, 5, 8


@dataclass(frozen=True)
class Described:
    """What a Parquet file says about itself."""

    lines: int
    metadata: dict[str, str]
    nbytes: int
    """How much memory its columns take once they are decoded, at most."""


def describe(data: bytes) -> Described:
    """Read the footer and all page headers of a file. Raises ValueError if they are not as they should be."""
    length = int.from_bytes(data[-8:-4], "little")
    begin = len(data) - 8 - length
    if data[:4] != MAGIC or data[-4:] != MAGIC or begin < 4:
        raise ValueError("it is no Parquet file")
    if length > FOOTER_BYTES:
        raise ValueError(f"its footer has {length:,} bytes")
    footer = _Thrift(data, begin, len(data) - 8).read()
    lines = _count(footer.get(FILE_ROWS))
    groups = _list(footer.get(FILE_GROUPS, []))
    rows = 0
    nbytes = 0
    for group in groups:
        group_rows = _count(_struct(group).get(GROUP_ROWS))
        rows += group_rows
        for column in _list(_struct(group).get(GROUP_COLUMNS)):
            nbytes += _column_bytes(data, begin, _struct(column), group_rows)
    if rows != lines:
        raise ValueError(f"its footer says {lines:,} lines, its row groups have {rows:,}")
    return Described(lines, _metadata(footer), nbytes)


def _column_bytes(data: bytes, footer: int, chunk: dict[int, Any], rows: int) -> int:
    """The memory that a column of a row group takes, from the headers of its pages. footer: where the footer begins."""
    column = _struct(chunk.get(CHUNK_COLUMN))
    if CHUNK_PATH in chunk:
        raise ValueError("a column is in another file")
    values = _count(column.get(COLUMN_VALUES))
    if len(_list(column.get(COLUMN_PATH))) == 1 and values != rows:
        raise ValueError(f"a column has {values:,} values for {rows:,} lines")
    data_pages = _count(column.get(COLUMN_DATA))
    place = _count(column.get(COLUMN_DICTIONARY, data_pages))
    if place > data_pages:  # Polars would read pages from there that nobody has looked at
        raise ValueError("the dictionary of a column lies behind its data")
    end = place + _count(column.get(COLUMN_COMPRESSED))
    if data_pages > end or end > footer:
        raise ValueError("a column reaches beyond the end of the data")
    counted, nbytes = _page_counts(data, place, end)
    if counted != values:
        raise ValueError(f"a column has {values:,} values, its pages have {counted:,}")
    return nbytes + VALUE_BYTES * values


def _page_counts(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return how many values the pages between two places have, and how many bytes once they are uncompressed."""
    values = 0
    nbytes = 0
    place = begin
    while place < end:
        reader = _Thrift(data, place, end)
        page = reader.read()
        nbytes += _count(page.get(PAGE_UNCOMPRESSED))
        place = reader.place + _count(page.get(PAGE_COMPRESSED))
        header = page.get(PAGE_DATA, page.get(PAGE_DATA_V2))
        if header is not None:
            values += _count(_struct(header).get(1))
    if place != end:
        raise ValueError("the pages of a column reach beyond its end")
    return values, nbytes


def _metadata(footer: dict[int, Any]) -> dict[str, str]:
    found = {}
    for pair in _list(footer.get(FILE_METADATA, [])):
        key = _struct(pair).get(1, b"")
        value = _struct(pair).get(2, b"")
        if isinstance(key, bytes) and isinstance(value, bytes):
            found[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return found


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a count in its footer or in the header of a page makes no sense")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("its footer is not as it should be")
    return value


def _struct(value: object) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise ValueError("its footer is not as it should be")
    return value


class _Thrift:
    """Reads structures of Thrift's compact protocol from some bytes; every length is compared with what is left of them."""

    def __init__(self, data: bytes, place: int, end: int):
        self.place = place
        self._data = data
        self._end = end

    def read(self) -> dict[int, Any]:
        """The fields of the structure that is here, by their numbers."""
        try:
            fields = self._struct(0)
        except IndexError:
            fields = None
        if fields is None or self.place > self._end:
            raise ValueError("its footer or the header of a page is cut short")
        return fields

    def _struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                return fields
            step = head >> 4
            number = number + step if step else self._zigzag()
            kind = head & 15
            if I16 <= kind <= I64:  # most of them: this is what takes the time
                fields[number] = self._zigzag()
            elif kind in (TRUE, FALSE):
                fields[number] = kind == TRUE
            else:
                fields[number] = self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError("its footer is nested too deeply")
        if kind == STRUCT:
            return self._struct(depth + 1)
        if I16 <= kind <= I64:
            return self._zigzag()
        if kind == BINARY:
            return self._bytes(self._varint())
        if kind in (LIST, SET):
            return self._elements(depth)
        if kind in (TRUE, FALSE, BYTE):  # within lists, a truth value is a byte
            return self._byte()
        if kind == DOUBLE:
            return self._bytes(8)
        raise ValueError("its footer is not as it should be")  # Parquet uses no maps

    def _elements(self, depth: int) -> list[Any]:
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self._varint()
        if count > self._end - self.place:  # an element takes at least a byte
            raise ValueError("a list in its footer is longer than the footer")
        return [self._value(head & 15, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        byte = self._data[self.place]
        self.place += 1
        return byte

    def _bytes(self, count: int) -> bytes:
        begin = self.place
        self.place = begin + count
        if self.place > self._end:
            raise ValueError("its footer or the header of a page is cut short")
        return self._data[begin : self.place]

    def _varint(self) -> int:
        byte = self._data[self.place]
        self.place += 1
        if byte < 128:
            return byte
        value = byte & 127
        for shift in range(7, 70, 7):
            byte = self._data[self.place]
            self.place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number in its footer is too long")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
