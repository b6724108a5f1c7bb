"""Many parameters put together again, by several threads: parameter by parameter, and segment by segment where these are replayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import TypeVar

from torch import Tensor

from dualform.dual.coefficients import is_elementwise
from dualform.dual.gradients import Keep, updates_of
from dualform.dual.masked import masked
from dualform.dual.segments import Segment, cut, replay
from dualform.dual.threads import shared_out
from dualform.dual.weights import rebuilt
from dualform.errors import QuestionError
from dualform.store.reader import Store

T = TypeVar("T")


def each_rebuilt(
    store: Store,
    parameters: Iterable[str],
    *,
    end: int,
    keep: Keep | None = None,
    trained: Mapping[str, Tensor] | None = None,
    workers: int = 1,
) -> Iterator[Tensor]:
    """`rebuilt` from the beginning, for each of the parameters in their order; `masked`, if there is a mask and it is given as it
    was trained.

    One worker walks through training once. With more, a segment needs memory for the parameter, its optimizer state, the masked
    parameter and up to four matrices of its transfer; at most `workers` are replayed and as many wait for those before them.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise QuestionError(f"workers={workers!r}: expected a whole number from 1 on.")
    names = list(parameters)
    if workers == 1:
        for name in names:
            yield _one(store, name, end, keep, trained)()
        return
    tasks = (task for name in names for task in _tasks(store, name, end, keep, trained))
    with closing(run(tasks, workers)) as done:
        for name in names:
            found = next(done)
            yield found if isinstance(found, Tensor) else _strung(store, name, found, done, end, keep)


def _one(
    store: Store, name: str, end: int, keep: Keep | None, trained: Mapping[str, Tensor] | None
) -> Callable[[], Tensor]:
    if keep is None or trained is None or name not in trained:
        return partial(rebuilt, store, name, begin=0, end=end, keep=keep)
    return partial(masked, store, name, trained[name], end=end, keep=keep)


def _tasks(
    store: Store, name: str, end: int, keep: Keep | None, trained: Mapping[str, Tensor] | None
) -> Iterator[Callable[[], Tensor | Segment]]:
    updates = updates_of(store, name, end=end)
    segments = cut(store, updates) if is_elementwise(updates) else []
    if len(segments) < 2:
        yield _one(store, name, end, keep, trained)
        return
    for some in segments:
        yield partial(replay, store, some, keep, first=some.begin == 0, last=some.end == end)


def _strung(
    store: Store, name: str, first: Segment, others: Iterator[Tensor | Segment], end: int, keep: Keep | None
) -> Tensor:
    """A parameter from its segments; in one walk, if the snapshots are not what its slots say."""
    weight, average, fits, segment = first.weight, first.average, first.fits, first
    while segment.updates.end < end:
        following = next(others)
        assert isinstance(following, Segment)
        segment = following
        weight, average = segment.after(store, weight, average)
        fits = fits and segment.fits
    return weight.double() if fits else rebuilt(store, name, begin=0, end=end, keep=keep)


def run(tasks: Iterable[Callable[[], T]], workers: int) -> Generator[T, None, None]:
    """The results of tasks, in order."""
    waiting = deque[Future[T]]()
    with shared_out(workers) as pool:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) == 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
