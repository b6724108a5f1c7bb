"""The documents that a recorded Transformer was trained on, token by token, and the places in them that a prompt reads from.

A recording has the tokens themselves: they are the keys of the layer that embeds them.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import torch
from torch import Tensor

import dualform
from dualform.errors import NotRecordedError, QuestionError
from dualform.language.answers import WIDTH, PromptAnswer, RankedPassage
from dualform.language.text import Passage
from dualform.layers.keys import OneHot
from dualform.query.answer import Answer
from dualform.query.attention import LayerAttention
from dualform.query.targets import logits_of, token_number

NEXT_TOKENS = 3
"""How many of the most probable next tokens an answer lists."""


class RecordedDocuments:
    """The documents of a recorded language model, which a column names; and prompts put to the model."""

    def __init__(self, dual: dualform.Dual, tokenizer: Any, by: str = "sample_id"):
        self.dual = dual
        self.tokenizer = tokenizer
        self.by = by
        self._vectors = dualform.open(dual.store.files).at(dual.end_step)
        self._tokens = self._read_tokens()

    def _read_tokens(self) -> pl.DataFrame:
        """Return a line for each document, position and token: `document`, `position`, `token`."""
        known = [column.name for column in self.dual.store.manifest.columns]
        if self.by not in known:
            raise QuestionError(f"by={self.by!r}: there is no such column. Columns: {', '.join(known) or 'none'}.")
        store = self.dual.store
        tables = []
        for chunk in store.chunks(self._embedding(), end_step=self.dual.end_step):
            keys = chunk.keys(torch.float32)
            assert isinstance(keys, OneHot)
            table = store.slot_table(chunk, [self.by]).rename({self.by: "document"})
            tables.append(
                table.with_columns(pl.Series("position", chunk.positions()), pl.Series("token", keys.places.numpy()))
            )
        # A padded position may have a key of zeros
        is_text = (pl.col("token") >= 0) & pl.col("token").ne_missing(self.tokenizer.pad_token_id)
        found = pl.concat(tables).filter(is_text).drop_nulls("document").unique().sort("document", "position")
        twice = found.filter(pl.struct("document", "position").is_duplicated())
        if twice.height:
            raise NotRecordedError(
                f"the tokens of {self.by} {twice['document'][0]} are at other positions in other visits (padding on the left, packing, "
                f"random cuts), so places in documents cannot be named. dual.sources(…) ranks whole documents."
            )
        return found

    def _embedding(self) -> str:
        """Return the layer whose keys are tokens: of the embeddings, the smallest that has room for the vocabulary."""
        layers = [layer for layer in self.dual.store.manifest.layers if layer.name in self.dual.layers]
        fitting = [layer for layer in layers if layer.form == "numbers" and layer.d_in >= len(self.tokenizer)]
        if not fitting or self.dual.store.manifest.keep == "totals":
            raise NotRecordedError(
                f"{self.dual.store.files} does not have the tokens of its documents: they are read from the slots of the layer that embeds "
                f"them, which must be recorded. dual.sources(…) ranks whole documents."
            )
        embedding = min(fitting, key=lambda layer: layer.d_in).name
        if self.dual.store.is_summed(embedding):
            raise NotRecordedError(
                f"{self.dual.store.why_no_positions(embedding)} dual.sources(…) ranks whole documents."
            )
        return embedding

    @property
    def place(self) -> tuple[str, str]:
        """The columns that name a place in the documents."""
        return self.by, "position"

    def encode(self, prompt: str) -> Tensor:
        """Return the tokens of a prompt, (tokens,)."""
        tokens = self.tokenizer(prompt)["input_ids"]
        if not tokens:
            raise QuestionError("the prompt is empty: expected at least one token.")
        return torch.tensor(tokens)

    def decode(self, tokens: Any) -> str:
        """Return tokens as text."""
        return str(self.tokenizer.decode(list(tokens)))

    def passage(self, document: Any, position: int, width: int = 100) -> Passage:
        """Return the token at a position of a document, with up to `width` characters before and after it."""
        mine = self._tokens.filter(pl.col("document") == document)
        tokens = mine["token"].to_list()
        places = mine["position"].to_list()
        if position not in places:
            raise QuestionError(f"document {document} has no token at position {position}.")
        here = places.index(position)
        # Long documents: a token has at least one character, nearly always
        before = self.decode(tokens[max(0, here - width) : here])
        after = self.decode(tokens[here + 1 : here + 1 + width])
        token = self.decode([tokens[here]])
        return Passage(position, f"{self.by} {document}", before[max(0, len(before) - width) :], token, after[:width])

    def beginning(self, width: int = 60) -> str:
        """Return how the first document begins: a prompt to start with."""
        first = self._tokens.filter(pl.col("document") == pl.col("document").first())
        text = self.decode(first["token"].to_list()[:width])[:width]
        return text.rpartition(" ")[0] or text

    def ask(
        self,
        prompt: str,
        *,
        top: int = 10,
        layer: str | None = None,
        target: str | None = None,
        where: str | None = None,
        absolute: bool = False,
        width: int = WIDTH,
    ) -> PromptAnswer:
        """Return the places in the documents with the highest scores for a prompt's last token.

        Attention weights of a layer (default: the last one that attends), or, with a target, contributions to the logit of that next token: of
        all layers, or of one. Scores are sums over the visits of a place.
        """
        if top < 1:
            raise QuestionError(f"top {top}: expected at least 1.")
        tokens = self.encode(prompt)
        with torch.no_grad():
            probabilities = logits_of(self.dual.model()(tokens[None]))[0, -1].softmax(0)
        best = probabilities.topk(min(NEXT_TOKENS, len(probabilities)))
        following = [(self.decode([int(unit)]), float(share)) for share, unit in zip(*best, strict=True)]
        if target is None:
            answer = self._attention(tokens, layer)
            score = f"attention weight in {answer.layer.name}"
            frame = answer.top(top + 1, by=self.place, where=where, absolute=absolute)
            value, count = answer.value, answer.sums(self.place, where=where).values.drop_nulls().height
        else:
            frame, score, count = self._pushing(tokens, target, layer, top + 1, where)
            value = "contribution"
        # Slots that serve all rows stand in no document
        lines = frame.drop_nulls(self.by)[:top].to_dicts()
        passages = [
            RankedPassage(
                rank, line[value], line["visits"], None, self.passage(line[self.by], line["slot_position"], width)
            )
            for rank, line in enumerate(lines, 1)
        ]
        query = self.decode([int(tokens[-1])])
        return PromptAnswer(prompt, f"{score}, sum over visits", query, following, count, passages)

    def _attention(self, tokens: Tensor, layer: str | None) -> LayerAttention:
        """Return the attention of the last token alone."""
        attention = self.dual.attend(tokens[None])
        name = list(attention)[-1] if layer is None else layer
        query = attention[name].queries[:, -1]
        _, recorded = self.dual.store.layer(name)
        if query.shape[-1] != recorded.d_in:  # an embedding's query is a number
            query = torch.nn.functional.one_hot(query[:, 0].long(), recorded.d_in).float()
        return self._vectors.attend({name: query})[name]

    def _pushing(
        self, tokens: Tensor, target: str, layer: str | None, top: int, where: str | None
    ) -> tuple[pl.DataFrame, str, int]:
        """Return the places that push the logit of a next token up most, what the scores are, and how many places there are."""
        token_number(target, self.tokenizer)  # says what is wrong, if anything is
        answers = self.dual.contributions(tokens[None], target=target, tokenizer=self.tokenizer, layers=layer, rows=1)
        answer: Any = answers if layer is None else answers[layer]
        through = "" if layer is None else f" through {layer}"
        frame = answer.top(top, by=self.place, where=where)
        first: Answer = next(iter(answers.values()))
        count = first.sums(self.place, where=where).values.drop_nulls().height
        return frame, f"contribution to the logit of {target!r}{through}", count
