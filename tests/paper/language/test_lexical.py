"""BM25 and common endings beside plain loops over windows that are written out."""

import math

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform_paper.language.lexical import K1, B, bm25_of_windows, common_ending

tokens = st.lists(st.integers(0, 3), max_size=25).map(lambda some: np.array(some, dtype=np.int64))


def windows(text, window, n):
    """The terms of the document that ends at each position."""
    documents = []
    for end in range(1, len(text) + 1):
        seen = text[max(0, end - window) : end]
        documents.append([tuple(seen[i : i + n]) for i in range(len(seen) - n + 1)])
    return documents


def direct(text, prompt, window, n):
    """The formula, document by document."""
    documents = windows(text.tolist(), window, n)
    asked = windows(prompt.tolist(), window, n)[-1] if len(prompt) else []
    mean = sum(map(len, documents)) / max(len(documents), 1)
    scores = []
    for document in documents:
        score = 0.0
        for term in asked:
            tf, df = document.count(term), sum(term in other for other in documents)
            if tf:
                idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
                score += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(document) / mean))
        scores.append(score)
    return scores


@given(tokens, tokens, st.integers(3, 8), st.integers(1, 3))
def test_bm25_is_its_formula(text, prompt, window, n):
    assert bm25_of_windows(text, prompt, window=window, n=n) == pytest.approx(
        direct(text, prompt, window, n), rel=1e-12
    )


@pytest.mark.parametrize("n", [1, 2, 3])
def test_bm25_of_windows_is_that_of_bm25s(n):
    random = np.random.default_rng(n)
    text = random.integers(0, 4, 200)
    prompt = random.integers(0, 4, 9)
    documents = [[str(term) for term in document] for document in windows(text.tolist(), 6, n)]
    query = [str(term) for term in windows(prompt.tolist(), 6, n)[-1]]
    index = bm25s.BM25(method="lucene", k1=K1, b=B, dtype="float64")
    index.index(documents, show_progress=False)
    # bm25s leaves out the factor k1 + 1, which changes no ranking
    expected = (K1 + 1) * index.get_scores(query)
    np.testing.assert_allclose(bm25_of_windows(text, prompt, window=6, n=n), expected, rtol=1e-12)


@given(tokens, tokens, st.integers(1, 6))
def test_a_common_ending_is_as_long_as_the_tokens_agree(text, prompt, most):
    expected = []
    for end in range(1, len(text) + 1):
        lengths = range(1, min(most, end, len(prompt)) + 1)
        same = (n for n in lengths if text[end - n : end].tolist() == prompt[len(prompt) - n :].tolist())
        expected.append(max(same, default=0))
    assert common_ending(text, prompt, most=most).tolist() == expected


def test_the_window_with_the_rare_word_wins():
    text = np.array([1, 1, 1, 1, 7, 1, 1, 1, 1, 1])
    scores = bm25_of_windows(text, np.array([1, 7]), window=2)
    assert scores.argmax() == 4  # the first of the two windows that hold both words
    assert scores[4] == scores[5] > scores[6]
