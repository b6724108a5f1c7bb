"""Rebuild many parameters, several at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial

from torch import Tensor

from dualform.dual.gradients import Keep
from dualform.dual.masked import masked
from dualform.dual.threads import run_in_order
from dualform.dual.weights import rebuilt
from dualform.errors import QuestionError
from dualform.store.reader import Store


def rebuild_each(
    store: Store,
    parameters: Iterable[str],
    *,
    end: int,
    keep: Keep | None = None,
    trained: Mapping[str, Tensor] | None = None,
    workers: int = 1,
) -> Iterator[Tensor]:
    """Rebuild each parameter from the beginning of training, in the order given.

    With a mask, a parameter that is also in `trained` is edited instead: see `dual/masked.py`.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise QuestionError(f"workers={workers!r}: expected a whole number from 1 on.")
    trained = trained or {}

    def rebuild(name: str) -> Tensor:
        if keep is not None and name in trained:
            return masked(store, name, trained[name], end=end, keep=keep)
        return rebuilt(store, name, begin=0, end=end, keep=keep)

    tasks = [partial(rebuild, name) for name in parameters]
    if workers == 1:
        for task in tasks:
            yield task()
        return
    with closing(run_in_order(tasks, workers)) as results:
        yield from results
