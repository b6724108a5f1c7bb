"""Influence: what would change in a target without some of the training data. Estimated; docs/influence.md says how well.

`estimate.py` goes from a question to an answer. It cuts training into `segments.py`, asks the model at each of them, and gives the
`problem.py` to a method of its table METHODS: "whitened" (`whitened.py`: the inner products of `products.py`, with the curvature of
`factors.py`, which `kept.py` keeps beside the store, between them), "kernel" (`kernel.py`) or "sketch" (`sketch.py`); the last two need a
`softmax.py` cross-entropy. All of them read slots by whole rows (`rows.py`). `scores.py` holds what a method found, `answers.py` what can be
asked of it, and `index.py` finds the best rows without reading all keys. `mislabelled.py` needs no test inputs: it looks at error signals alone.
"""
