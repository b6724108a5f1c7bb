"""The sizes of a language model, and the name of the layer that is asked about."""

from __future__ import annotations

from dataclasses import dataclass

LAYER = "lstm"
"""The layer that is asked about: the single linear map that makes all gates from input and previous hidden state."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a language model."""

    vocabulary: int
    embedding: int
    state: int
    dropout: float = 0.0
    between: int = 0
    """Width of a linear map between embedding and LSTM: the paper's text has none, the authors' code for characters has 1024."""

    @property
    def input(self) -> int:
        """The width of what the LSTM reads."""
        return self.between or self.embedding

    @property
    def key(self) -> int:
        """The width of the LSTM's keys: input and previous hidden state."""
        return self.input + self.state
