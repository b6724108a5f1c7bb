"""The language model in NumPy, for a prompt: what `LanguageModel` computes, without importing PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dualform.language.shape import Shape

Floats = np.ndarray[Any, np.dtype[Any]]


class Weights(Protocol):
    """Parameters by their names in the model."""

    def __getitem__(self, name: str, /) -> Floats: ...


class Read(NamedTuple):
    """What a prompt's last token comes to."""

    query: Floats
    """(d_in,): the LSTM's input and the hidden state before it."""
    logits: Floats
    """(vocabulary,) of the next token."""


def sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The parameters of the model."""
    gates = 4 * shape.state
    found: dict[str, tuple[int, ...]] = {
        "embedding.weight": (shape.vocabulary, shape.embedding),
        "lstm.weight_ih_l0": (gates, shape.input),
        "lstm.weight_hh_l0": (gates, shape.state),
        "lstm.bias_ih_l0": (gates,),
        "lstm.bias_hh_l0": (gates,),
        "decoder.weight": (shape.vocabulary, shape.state),
        "decoder.bias": (shape.vocabulary,),
    }
    between: dict[str, tuple[int, ...]] = {
        "between.weight": (shape.between, shape.embedding),
        "between.bias": (shape.between,),
    }
    return found | between if shape.between else found


def read(shape: Shape, weights: Weights, tokens: Sequence[int]) -> Read:
    """Run over a prompt of at least one token."""
    inputs = weights["embedding.weight"][list(tokens)]
    if shape.between:
        inputs = inputs @ weights["between.weight"].T + weights["between.bias"]
    gates = inputs @ weights["lstm.weight_ih_l0"].T + (weights["lstm.bias_ih_l0"] + weights["lstm.bias_hh_l0"])
    recurrent = weights["lstm.weight_hh_l0"]
    before = hidden = cell = np.zeros(shape.state, inputs.dtype)
    for one in gates:
        before = hidden
        enter, forget, new, leave = np.split(one + product(recurrent, hidden), 4)
        cell = _sigmoid(forget) * cell + _sigmoid(enter) * np.tanh(new)
        hidden = _sigmoid(leave) * np.tanh(cell)
    logits = product(weights["decoder.weight"], hidden) + weights["decoder.bias"]
    return Read(np.concatenate([inputs[-1], before]), logits)


def product(matrix: Floats, vector: Floats) -> Floats:
    """(n, d) · (d,), on one core: the threads of a BLAS wait for each other at every call, for seconds where others compute, too."""
    found: Floats = np.einsum("nd,d->n", matrix, vector)
    return found


def softmax(logits: Floats) -> Floats:
    """Probabilities."""
    raised = np.exp(logits - logits.max())
    found: Floats = raised / raised.sum()
    return found


def _sigmoid(x: Floats) -> Floats:
    found: Floats = 0.5 * (1 + np.tanh(0.5 * x))  # never overflows
    return found
