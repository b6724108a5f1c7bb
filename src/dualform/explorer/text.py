"""What the explorer needs to know about a language model: how text becomes tokens and tokens become text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dualform.explorer.forms import Excerpt


@dataclass(frozen=True)
class Language:
    """A text that a model was trained on, token by token."""

    encode: Callable[[str], Tensor]
    """From a prompt to its tokens, (tokens,)."""
    decode: Callable[[Sequence[int]], str]
    """From tokens to text."""
    passage: Callable[[int], Excerpt]
    """From a position in the training text to the text around it."""
    position: str
    """The column, one entry for each position of a row, that says where in the training text a slot stands."""
    logits: Callable[[Any], Tensor] = lambda output: output[0] if isinstance(output, tuple) else output
    """From the model's output to (rows, tokens, vocabulary)."""
    prompt: str = ""
    """To begin with."""
    longest: int = 400
    """So many characters of a prompt are taken."""
