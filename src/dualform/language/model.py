"""A language model as the paper has it: embedding, one LSTM layer, output layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualform.language.shape import Shape

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
        self.output_dropout = nn.Dropout(shape.output_dropout)
        self.decoder = nn.Linear(shape.state, shape.vocabulary)

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The input of the output layer, (rows, time, d_state), and the state after the last token."""
        embedded = self.dropout(self.embedding(tokens))
        output, state = self.lstm(self.between(embedded), state)
        return self.output_dropout(output), state

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run over some tokens."""
        output, state = self.hidden(tokens, state)
        return self.decoder(output), state


def build_model(shape: Shape, seed: int, embedding_range: float | None = None) -> LanguageModel:
    """A model with PyTorch's initial weights; with `embedding_range`, embeddings are uniform within ± this instead of N(0, 1)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LanguageModel(shape)
        if embedding_range is not None:
            nn.init.uniform_(model.embedding.weight, -embedding_range, embedding_range)
        return model
