"""The best of a list, by sorting all of it."""


def top(scores, k):
    """The places of the k highest scores, ties to the lower place."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:k]


def totals(scores, groups):
    """The sum of the scores of each group, in the order of their first appearance."""
    found = {}
    for score, group in zip(scores, groups, strict=True):
        found[group] = found.get(group, 0.0) + score
    return found
