"""Numbering groups as they appear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Numbering:
    """The groups that some columns make, in the order in which they appear."""

    def __init__(self, columns: Sequence[str], known: pl.DataFrame | None = None):
        self.columns = tuple(columns)
        rows = [] if known is None else known.select(self.columns).rows()
        self._numbers: dict[tuple[Any, ...], int] = {row: number for number, row in enumerate(rows)}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, values: Mapping[str, Any], shape: tuple[int, ...]) -> Ints:
        """The group of each row (rows,) or of each position (rows, positions); new groups get new numbers.

        values: by column, arrays of shape (rows,) or (rows, positions), lists, or a scalar for all.
        """
        codes, parts = np.zeros(int(np.prod(shape)), dtype=np.int64), []
        for name in self.columns:
            value = values[name]
            array = np.asarray(value, dtype=object if isinstance(value, (list, str)) else None)
            if array.ndim == 1 and len(shape) == 2:
                array = array[:, None]
            flat = np.broadcast_to(array, shape).reshape(-1)
            found, inverse = np.unique(flat.astype(str) if flat.dtype == object else flat, return_inverse=True)
            parts.append(found.tolist())
            codes = codes * len(found) + inverse.reshape(-1)
        met, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        numbers = np.empty(len(met), dtype=np.int64)
        for place in np.argsort(first).tolist():
            code, key = int(met[place]), tuple[Any, ...]()
            for part in reversed(parts):
                code, here = divmod(code, len(part))
                key = (part[here], *key)
            numbers[place] = self._numbers.setdefault(key, len(self._numbers))
        return numbers[inverse.reshape(-1)].reshape(shape)

    def table(self, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
        """The groups, one line each, in the order of their numbers."""
        types = {name: schema[name] for name in self.columns}
        return pl.DataFrame(list(self._numbers), schema=types, orient="row")
