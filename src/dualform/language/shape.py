"""The sizes of a language model, and the name of the layer that is asked about."""

from __future__ import annotations

from dataclasses import dataclass

LAYER = "lstm"
"""The layer that is asked about: the single linear map that makes all gates from input and previous hidden state."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a language model, and its dropout."""

    vocabulary: int
    embedding: int
    state: int
    dropout: float = 0.0
    """Of the embeddings, before the linear map if there is one."""
    between: int = 0
    """Width of a linear map between embedding and LSTM; 0: none. The authors' code has one for characters, the paper's text has none."""
    output_dropout: float = 0.0
    """Of the LSTM's output."""

    @property
    def input(self) -> int:
        """The width of the LSTM's input."""
        return self.between or self.embedding

    @property
    def key(self) -> int:
        """The width of the LSTM's keys: input and previous hidden state."""
        return self.input + self.state
