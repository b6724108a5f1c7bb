"""BM25 (Robertson and Zaragoza 2009): passages ranked by the words that they share with a query, rare words first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

K1 = 1.5
"""How soon a repeated word adds nothing more."""
B = 0.75
"""How much long passages are held back."""


def bm25(queries: Tensor, passages: Tensor) -> Tensor:
    """Return scores (queries, passages) from word numbers (queries, length) and (passages, length); needs bm25s.

    Lucene's form: Σ idf·tf / (tf + k1·(1 − b + b·length / mean length)) over the words of the query, repeated words included.
    """
    import bm25s

    words = int(max(queries.max(), passages.max())) + 1
    vocabulary = {str(word): word for word in range(words)}
    index = bm25s.BM25(method="lucene", k1=K1, b=B, dtype="float64")
    index.index((passages.tolist(), vocabulary), create_empty_token=False, show_progress=False)
    scores = [index.get_scores_from_ids(query) for query in queries.tolist()]
    return torch.from_numpy(np.stack(scores))
