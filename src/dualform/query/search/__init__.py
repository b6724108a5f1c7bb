"""The best slots of each query. `top_k` is the one door: an index answers where it pays, else all scores are computed.

`USE_INDEX = False` switches all indexes off.
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import TYPE_CHECKING

from dualform.query.ranking import Ranking, stacked
from dualform.query.reducers import TopK, TopKPerGroup
from dualform.query.scan import query_blocks, scan
from dualform.query.search.index import TopKRequest

if TYPE_CHECKING:
    from dualform.query.scorer import Scorer

USE_INDEX = True
"""False: all scores are computed, always. Answers are the same."""


def top_k(scorer: Scorer, request: TopKRequest, executor: Executor | None = None) -> list[Ranking]:
    """Return the k best slots of each query, for each group of the request; without groups, a list of one ranking.

    Exact, whichever way it is found.
    """
    index = scorer.index() if USE_INDEX else None
    found = None if index is None else index.search(request)
    return scan_top_k(scorer, request, executor) if found is None else found


def scan_top_k(scorer: Scorer, request: TopKRequest, executor: Executor | None = None) -> list[Ranking]:
    """Return the same by computing all scores."""
    blocks: list[list[Ranking]] = []
    for queries in query_blocks(scorer, request.k * request.group_count):
        settings = (queries.stop - queries.start, request.k, request.order, scorer.dtype)
        pieces = request.selection.pieces()
        if request.groups is None:
            best = scan(pieces, scorer, TopK(*settings), executor, queries=queries)
            blocks.append([best.ranking])
        else:
            reducer = TopKPerGroup(request.groups, *settings)
            blocks.append(scan(pieces, scorer, reducer, executor, queries=queries).rankings)
    return [stacked([block[group] for block in blocks], scorer.dtype) for group in range(request.group_count)]
