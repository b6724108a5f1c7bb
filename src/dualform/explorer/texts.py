"""Prompts: what a language model expects after each token, and where in its training text it reads."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

import dualform
from dualform.errors import QuestionError
from dualform.explorer.forms import Next, Passage, Passages, Prompt, Token
from dualform.explorer.keeping import Kept
from dualform.explorer.sources import SENTENCES
from dualform.explorer.subject import Subject
from dualform.explorer.text import Language
from dualform.progress import Progress
from dualform.query.answer import Answer

FOLLOWING = 10
"""So many next tokens are listed."""
KeyPart = Literal["both", "input", "recurrent"]


class Texts:
    """A language model, ready to be asked."""

    def __init__(self, subject: Subject, language: Language):
        self._subject, self._language = subject, language
        self._bare = dualform.open(subject.dual.store.files).at(subject.dual.end_step)
        """Without a model: attention for query vectors, so that one token is looked up and not the whole prompt."""
        self._logits: Kept[Tensor] = Kept(32 << 20, lambda tensor: tensor.numel() * tensor.element_size())
        self._queries: Kept[dict[str, Tensor]] = Kept(
            64 << 20, lambda found: sum(one.numel() * one.element_size() for one in found.values())
        )
        self._influence: Kept[Any] = Kept(1, lambda _: 1)
        """Of the token asked about last, so that another layer needs no other queries."""

    def _tokens(self, prompt: str) -> Tensor:
        if len(prompt) > self._language.longest:
            raise QuestionError(
                f"a prompt may have at most {self._language.longest} characters; this has {len(prompt)}."
            )
        return self._language.encode(prompt)

    def _expected(self, prompt: str) -> Tensor:
        """(tokens, vocabulary): log-probabilities of what follows each token."""

        def compute() -> Tensor:
            with torch.no_grad():
                output = self._subject.dual.model()(self._tokens(prompt).unsqueeze(0))
            return self._language.logits(output)[0].double().log_softmax(-1)

        return self._logits.get(prompt, compute)

    def prompt(self, prompt: str, position: int | None) -> Prompt:
        """A prompt token by token, and what may follow one of them (default: the last)."""
        tokens = self._tokens(prompt).tolist()
        chosen = self._position(tokens, position)
        expected = self._expected(prompt)
        best = expected[chosen].topk(min(FOLLOWING, expected.shape[1]))
        shown = [self._language.decode([token]) for token in tokens]
        return Prompt(
            tokens=[
                Token(position=n, text=text, probability=float(expected[n - 1, tokens[n]].exp()) if n else None)
                for n, text in enumerate(shown)
            ],
            position=chosen,
            following=[
                Next(
                    unit=unit,
                    text=self._language.decode([unit]),
                    probability=float(expected[chosen, unit].exp()),
                    prompt=self._language.decode([*tokens[: chosen + 1], unit]),
                )
                for unit in best.indices.tolist()
            ],
        )

    def _position(self, tokens: list[int], position: int | None) -> int:
        chosen = len(tokens) - 1 if position is None else position
        if not 0 <= chosen < len(tokens):
            raise QuestionError(f"there is no token {chosen}: the prompt has {len(tokens)}, from 0 on.")
        return chosen

    def passages(
        self,
        prompt: str,
        position: int | None,
        layer: str,
        kind: Literal["attention", "contribution"],
        *,
        target: int | None,
        gate: str | None,
        part: KeyPart,
        k: int,
    ) -> Passages:
        """The places of the training text that a layer reads most at a token; of contributions, also from the other end."""
        tokens = self._tokens(prompt)
        chosen = self._position(tokens.tolist(), position)
        unit = self._unit(prompt, chosen, target)
        answer: Any
        if kind == "attention":
            answer = self._bare.attend({layer: self._query(prompt, layer, chosen)})[layer]
        else:
            logits = self._language.logits
            answer = self._subject.dual.contributions(
                tokens.unsqueeze(0), target=lambda output: logits(output)[:, chosen, unit], rows=1
            )[layer]
        answer = answer if part == "both" else answer.part(part)
        answer = answer if gate is None or kind == "attention" else answer.gate(gate)
        lowest = [] if kind == "attention" else self._best(answer, k, lowest=True)
        return Passages(
            layer=layer,
            kind=kind,
            sentence=SENTENCES[kind][1],
            token=self._language.decode([int(tokens[chosen])]),
            towards="" if kind == "attention" else self._language.decode([unit]),
            highest=self._best(answer, k),
            lowest=lowest,
        )

    def influence(
        self,
        prompt: str,
        position: int | None,
        layer: str,
        *,
        target: int | None = None,
        k: int = 8,
        progress: Progress | None = None,
    ) -> Passages:
        """The places of the training text without which a next token would change most, estimated in one layer; long work."""
        tokens = self._tokens(prompt)
        chosen = self._position(tokens.tolist(), position)
        unit = self._unit(prompt, chosen, target)

        def margin(output: Any) -> Tensor:
            """log(p / (1 − p)) of the token."""
            found = self._language.logits(output)[:, chosen]
            others = torch.arange(found.shape[1]) != unit
            return found[:, unit] - found[:, others].logsumexp(1)

        def compute() -> Any:
            return self._subject.dual.influence(tokens.unsqueeze(0), target=margin, rows=1, progress=progress)

        answer = self._influence.get((prompt, chosen, unit), compute)[layer]
        return Passages(
            layer=layer,
            kind="influence",
            sentence=SENTENCES["influence"][1],
            token=self._language.decode([int(tokens[chosen])]),
            towards=self._language.decode([unit]),
            highest=self._best(answer, k),
            lowest=self._best(answer, k, lowest=True),
        )

    def _unit(self, prompt: str, position: int, target: int | None) -> int:
        """The next token that is asked about; default: the likeliest."""
        expected = self._expected(prompt)[position]
        unit = int(expected.argmax()) if target is None else target
        if unit >= len(expected):
            raise QuestionError(f"there is no token number {unit} in the vocabulary.")
        return unit

    def _query(self, prompt: str, layer: str, position: int) -> Tensor:
        """(1, d_in): a layer's query at a token."""

        def compute() -> dict[str, Tensor]:
            found = self._subject.dual.attend(self._tokens(prompt).unsqueeze(0), rows=1)
            return {name: answer.queries.detach() for name, answer in found.items()}

        found = self._queries.get(prompt, compute)
        if layer not in found:
            raise QuestionError(f"layer {layer!r} has no attention here. Layers: {', '.join(found)}.")
        query = found[layer][:, position]
        _, recorded = self._subject.dual.store.layer(layer)
        if query.shape[-1] == recorded.d_in:
            return query
        return torch.nn.functional.one_hot(query[:, 0].long(), recorded.d_in).float()  # an embedding's is a number

    def _best(self, answer: Answer, k: int, *, lowest: bool = False) -> list[Passage]:
        """The k places with the highest totals. Slots that serve all rows stand nowhere in the text."""
        position = self._language.position
        top = answer.top(k + 1, by=position, lowest=lowest).drop_nulls(position)[:k]
        return [
            Passage(
                excerpt=self._language.passage(int(line[position])),
                weight=float(line[answer.value]),
                visits=int(line["visits"]),
            )
            for line in top.to_dicts()
        ]
