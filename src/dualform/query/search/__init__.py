"""Find the best slots of each query. `top_k` asks an index if the scorer has one that pays off, and otherwise computes all scores.

`USE_INDEX = False` turns all indexes off.
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import TYPE_CHECKING

from dualform.query.ranking import Ranking, stacked_by_group
from dualform.query.reducers import TopK, TopKPerGroup
from dualform.query.scan import query_blocks, scan
from dualform.query.search.index import TopKRequest

if TYPE_CHECKING:
    from dualform.query.scorer import Scorer

USE_INDEX = True
"""False: always compute all scores. The answers are the same."""


def top_k(scorer: Scorer, request: TopKRequest, executor: Executor | None = None) -> list[Ranking]:
    """Return the k best slots of each query, for each group of the request; without groups, a list of one ranking.

    The result is exact, with or without an index.
    """
    index = scorer.index() if USE_INDEX else None
    if index is not None:
        rankings = index.search(request)
        if rankings is not None:
            return rankings
    return scan_top_k(scorer, request, executor)


def scan_top_k(scorer: Scorer, request: TopKRequest, executor: Executor | None = None) -> list[Ranking]:
    """Return the same by computing all scores."""
    groups = request.groups
    blocks: list[list[Ranking]] = []
    for queries in query_blocks(scorer, request.k * request.group_count):
        count = queries.stop - queries.start
        pieces = request.selection.pieces()
        best = TopK(count, request.k, request.order, scorer.dtype)
        if groups is None:
            scan(pieces, scorer, best, executor, queries=queries)
            blocks.append([best.ranking])
        else:
            best_per_group = TopKPerGroup(groups, best)
            scan(pieces, scorer, best_per_group, executor, queries=queries)
            blocks.append(best_per_group.rankings)
    return stacked_by_group(blocks, request.group_count, scorer.dtype)
