"""Find the best slots of each query. `top_k` asks an index if the scorer has one that pays off, and otherwise computes all scores.

`USE_INDEX = False` turns all indexes off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualform.query.executors import HERE, Runner
from dualform.query.ranking import Ranking, stacked_by_group
from dualform.query.reducers import TopK, TopKPerGroup
from dualform.query.scan import scan_blocks
from dualform.query.search.index import TopKRequest

if TYPE_CHECKING:
    from dualform.query.scorer import Scorer

USE_INDEX = True
"""False: always compute all scores. The answers are the same."""


def top_k(scorer: Scorer, request: TopKRequest, executor: Runner = HERE) -> list[Ranking]:
    """Return the k best slots of each query, for each group of the request; without groups, a list of one ranking.

    The result is exact, with or without an index.
    An index belongs to the process that asks, so where tasks are sent to others, all scores are computed.
    """
    may_search = USE_INDEX and executor.backend.shares_memory
    index = scorer.index() if may_search else None
    if index is not None:
        rankings = index.search(request)
        if rankings is not None:
            return rankings
    return scan_top_k(scorer, request, executor)


def scan_top_k(scorer: Scorer, request: TopKRequest, executor: Runner = HERE) -> list[Ranking]:
    """Return the same by computing all scores."""
    groups = request.groups
    pieces = request.selection.pieces
    width = request.k * request.group_count

    def best_of(count: int) -> TopK:
        return TopK(count, request.k, request.order, scorer.dtype)

    if groups is None:
        scanned = scan_blocks(scorer, width, pieces, best_of, executor)
        rankings = [[best.ranking] for _, best in scanned]
    else:
        per_group = scan_blocks(scorer, width, pieces, lambda count: TopKPerGroup(groups, best_of(count)), executor)
        rankings = [best.rankings for _, best in per_group]
    return stacked_by_group(rankings, request.group_count, scorer.dtype)
