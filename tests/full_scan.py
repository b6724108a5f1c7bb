"""The best slots by computing all scores: what every search must find."""

from dualform.query.conditions import Condition
from dualform.query.scorer import Selection
from dualform.query.search import scan_top_k
from dualform.query.search.index import TopKRequest


def top_by_scan(answer, k, *, where=None, absolute=False, lowest=False):
    scorer = answer._scorer
    order = "absolute" if absolute else "lowest" if lowest else "highest"
    condition = None if where is None else Condition(scorer.store, where, scorer.end)
    [ranking] = scan_top_k(scorer, TopKRequest(k, order, Selection(scorer, condition, answer._silent)))
    return ranking
