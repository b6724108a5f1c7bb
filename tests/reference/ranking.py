"""The best of a list, by sorting all of it."""

import numpy as np
import polars as pl


def top(scores, k):
    """The places of the k highest scores, ties to the lower place."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:k]


def totals(scores, groups):
    """The sum of the scores of each group, in the order of their first appearance."""
    found = {}
    for score, group in zip(scores, groups, strict=True):
        found[group] = found.get(group, 0.0) + score
    return found


def agrees(found, every, value, *, rtol):
    """Is `found` the beginning of `every`, a ranking of all rows?

    Equal keys have equal scores but for rounding, which is not the same for every shape of a product nor on every
    processor: of rows whose scores are as good as equal, either may come first.
    """
    first = every.filter(pl.col("rank") <= found["rank"].max())
    assert found["rank"].equals(first["rank"])
    assert np.allclose(found[value], first[value], rtol=rtol, atol=rtol)
    others = [name for name in every.columns if name not in ("rank", value)]
    same = found.join(every, on=others, how="inner", maintain_order="left", nulls_equal=True)
    assert found.select(others).is_unique().all()
    assert same[value].equals(found[value])  # each is a row of them all
    assert np.allclose(same[value], same[f"{value}_right"], rtol=rtol, atol=rtol)
