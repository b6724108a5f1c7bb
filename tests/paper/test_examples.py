"""Which test image is taken for an example of the paper."""

import pytest
import torch

from dualform_paper.examples import RULES, Candidates, choose
from dualform_paper.settings import EXPERIMENTS

BY_KEY = {(experiment, rule.key): rule for experiment, rules in RULES.items() for rule in rules}


def candidates(*images):
    """Each image: label, answer, answer after the first phase, elected."""
    columns = torch.tensor(images, dtype=torch.long).reshape(-1, 4).T
    return Candidates(*columns)


OTHERS = ((0, 0, 0, 0), (8, 2, 2, 2))
"""They fit no rule."""
CHOICES = {
    "the first that fits": ("single-task", "six", [(6, 5, 6, 6), (6, 6, 0, 0), (6, 6, 6, 6)], (3, True)),
    "none is answered right": ("single-task", "three", [(3, 5, 3, 3), (5, 3, 3, 3)], (0, False)),
    "boot": ("joint", "boot", [(9, 9, 9, 1)], (2, True)),
    "dress": ("joint", "dress", [(3, 4, 3, 3), (3, 3, 3, 3)], (3, True)),
    "the totals elect another class": ("joint", "sandal", [(5, 5, 5, 5), (5, 7, 7, 7), (5, 5, 5, 7)], (4, True)),
    "the totals elect the right class": ("joint", "sandal", [(5, 7, 5, 7), (5, 5, 5, 5)], (3, False)),
    "no sandal": ("joint", "sandal", [(5, 7, 5, 7)], (0, False)),
    "forgotten": ("continual", "one", [(1, 7, 1, 1), (1, 3, 7, 1), (1, 3, 1, 1)], (4, True)),
    "forgotten otherwise": ("continual", "one", [(1, 1, 1, 1), (1, 7, 1, 1), (1, 3, 7, 1)], (3, False)),
    "nothing forgotten": ("continual", "one", [(1, 1, 1, 1)], (0, False)),
    "still right": ("continual", "seven", [(7, 9, 7, 7), (7, 7, 9, 9)], (3, True)),
    "still a dress": ("continual", "dress", [(3, 3, 0, 0)], (2, True)),
}


@pytest.mark.parametrize("words", CHOICES)
def test_choices(words):
    experiment, key, images, expected = CHOICES[words]
    assert choose(BY_KEY[experiment, key], candidates(*OTHERS, *images)) == expected


@pytest.mark.parametrize("rule", BY_KEY.values(), ids=["-".join(key) for key in BY_KEY])
def test_no_image_at_all_fits(rule):
    assert choose(rule, candidates(*OTHERS)) == (0, False)


def test_rules_are_about_datasets_of_their_experiment():
    assert set(RULES) == set(EXPERIMENTS)
    for experiment, rules in RULES.items():
        known = {name for phase in EXPERIMENTS[experiment] for name in phase.datasets}
        assert {rule.dataset for rule in rules} <= known
        assert len({rule.key for rule in rules}) == len(rules)
