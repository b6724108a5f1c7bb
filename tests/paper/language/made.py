"""Texts for tests."""

import numpy as np

from dualform.language import text as texts
from dualform.language.text import Part, Text


def made(test, unit, train="a", name="made"):
    """A text of these tokens."""
    parts = [texts.split(one, unit) for one in (train, test)]
    vocabulary = tuple(dict.fromkeys(parts[0] + parts[1]))
    return Text(name, unit, vocabulary, *(Part(np.array([vocabulary.index(t) for t in p], np.int32)) for p in parts))
