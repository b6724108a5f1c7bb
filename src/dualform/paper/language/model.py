"""The paper's language models: embedding, one LSTM layer, output layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualform.paper.language.shape import Shape

State = tuple[Tensor, Tensor]
"""(1, rows, d_state) each: hidden state and cell."""


class LanguageModel(nn.Module):
    """Tokens (rows, time) and state → logits of the next tokens (rows, time, vocabulary) and state."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.embedding)
        self.between = nn.Linear(shape.embedding, shape.between) if shape.between else nn.Identity()
        self.lstm = nn.LSTM(shape.input, shape.state, batch_first=True)
        self.dropout = nn.Dropout(shape.dropout)
        self.decoder = nn.Linear(shape.state, shape.vocabulary)

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """What the output layer reads, (rows, time, d_state), and the state after the last token."""
        found, state = self.lstm(self.dropout(self.between(self.embedding(tokens))), state)
        return self.dropout(found), state

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run over some tokens."""
        found, state = self.hidden(tokens, state)
        return self.decoder(found), state


def built(shape: Shape, seed: int) -> LanguageModel:
    """A model with PyTorch's own initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(shape)
