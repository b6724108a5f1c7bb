"""What the explorer needs to know about a language model: how text becomes tokens and tokens become text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dualform.explorer.forms import Excerpt
from dualform.language.documents import RecordedDocuments
from dualform.language.text import Passage
from dualform.query.targets import logits_of


@dataclass(frozen=True)
class Language:
    """A text that a model was trained on, token by token."""

    encode: Callable[[str], Tensor]
    """From a prompt to its tokens, (tokens,)."""
    decode: Callable[[Sequence[int]], str]
    """From tokens to text."""
    passage: Callable[..., Excerpt]
    """From a place in the training text, what the columns of `position` have there, to the text around it."""
    position: str | tuple[str, ...]
    """The column, one entry for each position of a row, that says where in the training text a slot stands; or several columns,
    such as ("sample_id", "position"): a document, and the position in its row."""
    logits: Callable[[Any], Tensor] = logits_of
    """From the model's output to (rows, tokens, vocabulary)."""
    prompt: str = ""
    """To begin with."""
    longest: int = 400
    """So many characters of a prompt are taken."""


def excerpt(passage: Passage) -> Excerpt:
    """A passage as the page shows it."""
    return Excerpt(
        before=passage.before, token=passage.token, after=passage.after, title=passage.title, position=passage.position
    )


def language_of(documents: RecordedDocuments) -> Language:
    """The documents that a Transformer was trained on, and its tokenizer."""
    return Language(
        encode=documents.encode,
        decode=documents.decode,
        passage=lambda document, position: excerpt(documents.passage(document, position)),
        position=documents.place,
        prompt=documents.beginning(),
    )
