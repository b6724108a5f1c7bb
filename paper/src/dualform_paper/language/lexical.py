"""What a search by the letter finds: BM25 and the longest common ending, a score for each position of the training text.

A position's document is the window of tokens that ends there, as the network has read it. Terms are n-grams of tokens: words themselves
(n = 1), or stretches of characters. bm25s, which `dualform.evaluate` uses, indexes documents one by one: 2.1 million windows would
repeat the text twenty times. Here each term of a prompt is one pass over the text, and a test compares the scores with those of bm25s.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Scores = np.ndarray[Any, np.dtype[np.float64]]
K1, B = 1.2, 0.75
"""Lucene's: how soon a term repeated adds nothing, and how much long documents are held back."""


def bm25_of_windows(text: Ints, prompt: Ints, *, window: int, n: int = 1) -> Scores:
    """BM25 of the prompt's last window with the window that ends at each position of the text, (positions,).

    Σ over the prompt's terms of idf·tf·(k1 + 1) / (tf + k1·(1 − b + b·length / mean length)), idf = ln(1 + (N − df + ½) / (df + ½)).
    """
    lengths = np.clip(np.minimum(np.arange(1, len(text) + 1), window) - n + 1, 0, None)
    mean = max(float(lengths.mean()), 1e-9) if len(text) else 1.0

    def saturated(frequency: Ints, length: Ints | int) -> Scores:
        return frequency * (K1 + 1) / (frequency + K1 * (1 - B + B * length / mean))

    whole = saturated(np.arange(window - n + 2), window - n + 1)  # nearly all documents are this long
    scores = np.zeros(len(text))
    last = [int(token) for token in prompt[-window:]]
    for term, times in Counter(zip(*(last[i:] for i in range(n)), strict=False)).items():
        frequency = _in_window(_ends(text, term), window - n + 1)
        documents = int(np.count_nonzero(frequency))
        if documents:
            idf = math.log1p((len(text) - documents + 0.5) / (documents + 0.5))
            scores[:window] += times * idf * saturated(frequency[:window], lengths[:window])
            scores[window:] += (times * idf * whole)[frequency[window:]]
    return scores


def common_ending(text: Ints, prompt: Ints, *, most: int) -> Scores:
    """How many tokens before and at each position are the prompt's last ones, (positions,)."""
    lengths, alike = np.zeros(len(text)), np.ones(len(text), dtype=bool)
    for back, token in enumerate(prompt[::-1][:most].tolist()):
        alike[:back] = False
        alike[back:] &= text[: len(text) - back] == token
        if not alike.any():
            break
        lengths += alike
    return lengths


def _ends(text: Ints, term: tuple[int, ...]) -> Flags:
    """Where a term ends."""
    found = np.zeros(len(text), dtype=bool)
    begin = len(term) - 1
    found[begin:] = True
    for back, token in enumerate(reversed(term)):
        found[begin:] &= text[begin - back : len(text) - back] == token
    return found


def _in_window(flags: Flags, width: int) -> Ints:
    """How many of the last `width` flags are set, at each position."""
    so_far: Ints = np.cumsum(flags, dtype=np.int32)
    inside = so_far.copy()
    inside[width:] -= so_far[: max(0, len(flags) - width)]
    return inside
