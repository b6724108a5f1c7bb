"""One pass over slots: a scorer computes their scores tile by tile, and a reducer keeps what a question asks for.

`scan(pieces, scorer, reducer)` runs in this thread. With an executor, each piece is reduced by a task of its own, and the partial
results are merged in the order of the pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from dualform.query.scorer import Scorer

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
BLOCK_BYTES = 256 << 20
"""How much memory the results of a block of queries may take, in float64."""
MOST_QUERIES = 16384
TASKS_AHEAD = 8
"""How many pieces are handed to an executor before the first of their results is merged."""


class Run(Protocol):
    """A run of consecutive slots: a chunk of the store, or some rows of one."""

    @property
    def first_slot(self) -> int:
        """The number of its first slot."""

    @property
    def slots(self) -> int:
        """How many slots it has."""

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """Ranges of slots that may be decoded at a time, if `width` numbers are needed for each slot."""


@dataclass(frozen=True)
class Piece:
    """A run of slots, and which of them take part."""

    run: Any
    selected: Bools | None = None
    """(slots,); None: all."""


@dataclass(frozen=True)
class Tile:
    """The scores of some queries for some slots of a piece."""

    slots: Tensor
    """(m,): slot numbers, ascending."""
    scores: Tensor
    """(queries, m)"""
    piece: Piece
    places: Ints
    """(m,): where the slots stand within the piece."""


R = TypeVar("R", bound="Reducer")


class Reducer(Protocol):
    """What a question keeps of the scores. Partial results can be merged."""

    def add(self, tile: Tile) -> None:
        """Take in the scores of a tile."""

    def merge(self: R, other: R) -> None:
        """Take in the result of another reducer that has seen other slots."""

    def empty(self: R) -> R:
        """Return a reducer for the same question that has seen nothing."""


def scan(
    pieces: Iterable[Piece],
    scorer: Scorer,
    reducer: R,
    executor: Executor | None = None,
    *,
    queries: slice | None = None,
) -> R:
    """Give the scores of all pieces to a reducer, and return it. queries: only these; default: all."""
    queries = slice(0, scorer.queries) if queries is None else queries
    if executor is None:
        for tile in tiles(pieces, scorer, queries):
            reducer.add(tile)
        return reducer

    def reduce_one(piece: Piece) -> R:
        return scan([piece], scorer, reducer.empty(), queries=queries)

    waiting: deque[Future[R]] = deque()
    for piece in pieces:
        waiting.append(executor.submit(reduce_one, piece))
        if len(waiting) > TASKS_AHEAD:
            reducer.merge(waiting.popleft().result())
    while waiting:
        reducer.merge(waiting.popleft().result())
    return reducer


def tiles(pieces: Iterable[Piece], scorer: Scorer, queries: slice) -> Iterator[Tile]:
    """Compute all scores of some queries, in the order of slot numbers."""
    count = queries.stop - queries.start
    numbers_per_slot = max(scorer.layer.d_in + scorer.layer.d_out, count * scorer.numbers_per_score)
    for piece in pieces:
        run = piece.run
        for low, high in run.pieces(numbers_per_slot):
            places = np.arange(low, high)
            if piece.selected is not None:
                places = places[piece.selected[low:high]]
            if not len(places):
                continue
            scores = scorer.score(queries, run, low, high)
            if len(places) < high - low:
                scores = scores[:, torch.from_numpy(places - low)]
            yield Tile(torch.from_numpy(places + run.first_slot), scores, piece, places)


def query_blocks(scorer: Scorer, width: int) -> Iterator[slice]:
    """Split the queries, such that `width` results for each, and what the scorer holds for each, stay within memory."""
    numbers_per_query = max(1, width, scorer.numbers_per_query)
    size = max(1, min(MOST_QUERIES, BLOCK_BYTES // (8 * numbers_per_query)))
    for low in range(0, scorer.queries, size):
        yield slice(low, min(low + size, scorer.queries))
