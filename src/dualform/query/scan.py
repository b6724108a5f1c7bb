"""One pass over slots: a scorer computes their scores tile by tile, and a reducer keeps what a question asks for.

Pieces are cut into tasks. Each reduces its own pieces, in this thread or on an executor (executors.py), and the partial results are merged
in the order of the pieces: an executor changes no bit of an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Bools, Ints
from dualform.query.executors import HERE, Runner, runner_of

if TYPE_CHECKING:
    from dualform.query.scorer import Scorer
    from dualform.store.reader import Store
BLOCK_BYTES = 256 << 20
"""How much memory the results of a block of queries may take, in float64."""
MOST_QUERIES = 16384
TASK_BYTES = 256 << 20
"""How much a task decodes, in float64; one piece at least. A task of this size takes a tenth of a second or longer."""
MOST_TASKS = 4096
"""Tasks of larger scans are larger: the process that asks needs about a millisecond for each."""


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


@dataclass(frozen=True)
class Task:
    """Some pieces whose scores are reduced together: the part of a scan that runs in one go, perhaps in another process."""

    pieces: Sequence[Piece]
    scorer: Scorer
    reducer: Any
    """Says what is kept, and has seen nothing."""
    queries: slice

    @property
    def runs(self) -> list[Any]:
        """The runs of slots that it scores."""
        return [piece.run for piece in self.pieces]

    @property
    def store(self) -> Store:
        """The store that they are in."""
        return self.scorer.store

    @property
    def nbytes(self) -> int:
        """How much it decodes, about."""
        slots: int = sum(run.slots for run in self.runs)
        return 8 * self.scorer.numbers_per_slot * slots

    @property
    def end_slot(self) -> int:
        """The slot after its last."""
        last = self.pieces[-1].run
        end: int = last.first_slot + last.slots
        return end

    def part(self) -> Task:
        """Return the same task with no more of the scorer than it needs."""
        return replace(self, scorer=self.scorer.part(self.runs))

    def run(self) -> Any:
        """Return a reducer that has seen the scores of these pieces."""
        reducer = self.reducer.empty()
        for tile in tiles(self.pieces, self.scorer, self.queries):
            reducer.add(tile)
        return reducer


def scan(
    pieces: Iterable[Piece],
    scorer: Scorer,
    reducer: R,
    executor: Executor | Runner | None = None,
    *,
    queries: slice | None = None,
) -> R:
    """Give the scores of all pieces to a reducer, and return it. queries: only these; default: all."""
    queries = slice(0, scorer.queries) if queries is None else queries
    tasks = _tasks(pieces, scorer, reducer.empty(), queries)
    with closing(_results(tasks, scorer, executor)) as results:
        for result in results:
            reducer.merge(result)
    return reducer


def scan_blocks(
    scorer: Scorer,
    width: int,
    pieces: Callable[[], Iterable[Piece]],
    reducer_of: Callable[[int], R],
    executor: Executor | Runner | None = None,
) -> Iterator[tuple[slice, R]]:
    """Scan for a block of queries at a time; yield each block with its reducer. Tasks of the next block do not wait for the last one's.

    width: how many numbers are kept for each query. reducer_of: returns the reducer for so many queries.
    """
    blocks = list(query_blocks(scorer, width))
    homes: deque[int] = deque()
    """The block of each task whose result is awaited."""

    def tasks() -> Iterator[Task]:
        for number, queries in enumerate(blocks):
            empty = reducer_of(queries.stop - queries.start)
            for task in _tasks(pieces(), scorer, empty, queries):
                homes.append(number)
                yield task

    done = 0
    reducers = (reducer_of(queries.stop - queries.start) for queries in blocks)
    reducer = next(reducers, None)
    with closing(_results(tasks(), scorer, executor)) as results:
        for result in results:
            home = homes.popleft()
            while done < home:  # a block without pieces has no tasks
                assert reducer is not None
                yield blocks[done], reducer
                reducer = next(reducers)
                done += 1
            assert reducer is not None
            reducer.merge(result)
    while reducer is not None:
        yield blocks[done], reducer
        reducer = next(reducers, None)
        done += 1


def _results(tasks: Iterable[Task], scorer: Scorer, executor: Executor | Runner | None) -> Generator[Any, None, None]:
    """Yield the results of tasks in their order, and report how far they are."""
    runner = HERE if scorer.is_computed else runner_of(executor)
    progress = runner.progress
    ends: deque[int] = deque()

    def noted() -> Iterator[Task]:
        for task in tasks:
            ends.append(task.end_slot)
            yield task

    with closing(runner.backend.run(noted())) as results:
        for result in results:
            yield result
            if progress is not None:
                progress(f"scoring {scorer.what}", ends.popleft(), scorer.end_slot)


def _tasks(pieces: Iterable[Piece], scorer: Scorer, empty: Any, queries: slice) -> Iterator[Task]:
    """Cut pieces into tasks. What a task holds does not depend on where it runs, so sums round the same everywhere."""
    all_bytes = 8 * scorer.numbers_per_slot * scorer.end_slot
    task_bytes = max(TASK_BYTES, all_bytes // MOST_TASKS)
    waiting: list[Piece] = []
    for piece in pieces:
        waiting.append(piece)
        task = Task(waiting, scorer, empty, queries)
        if scorer.is_divisible and task.nbytes >= task_bytes:
            yield task
            waiting = []
    if waiting:
        yield Task(waiting, scorer, empty, queries)


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
