"""A text for a language model: its tokens as numbers, and where each of them stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualform.errors import DataError, QuestionError

if TYPE_CHECKING:
    from torch import Tensor

Ids = np.ndarray[Any, np.dtype[np.int32]]
UNITS = ("character", "word")
LINE_END, RARE = "<eos>", "<unk>"
LOOKALIKES = {"'": "’‘", '"': "“”", "-": "—", "–": "—", "`": "‘", "…": "."}
"""What keyboards have, and what books have in its place."""
SAID = 5
"""How many unknown tokens a message lists."""


@dataclass(frozen=True)
class Passage:
    """A token with the text around it."""

    position: int
    title: str
    """Of its fable or article."""
    before: str
    token: str
    after: str


@dataclass(frozen=True)
class Part:
    """The training, validation or test part of a text."""

    ids: Ids
    """(tokens,)"""
    starts: Sequence[int] = ()
    """Where fables or articles begin."""
    titles: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def title(self, position: int) -> str:
        """Of the fable or article that a token stands in; empty where there is none."""
        place = int(np.searchsorted(self.starts, position, side="right"))
        return self.titles[place - 1] if place else ""


@dataclass(frozen=True)
class Text:
    """A text in characters or words; the number of a token is its place in the vocabulary."""

    name: str
    unit: str
    vocabulary: tuple[str, ...]
    train: Part
    test: Part
    valid: Part | None = None

    @cached_property
    def numbers(self) -> dict[str, int]:
        """By token, its number."""
        return {token: number for number, token in enumerate(self.vocabulary)}

    def part(self, name: str) -> Part:
        """The part with this name: train, valid or test."""
        found = {"train": self.train, "valid": self.valid, "test": self.test}.get(name)
        if found is None:
            raise QuestionError(f"{self.name} has no part {name!r}.")
        return found

    def numbered(self, prompt: str) -> list[int]:
        """The numbers of a prompt's tokens. Words stand between blanks; the end of a line is a token."""
        tokens = split(prompt, self.unit)
        if not tokens:
            raise QuestionError(f"the prompt is empty: expected at least one {self.unit}.")
        if len(tokens) > len(self.train):
            raise QuestionError(
                f"the prompt has {len(tokens):,} {self.unit}s, more than the training text ({len(self.train):,}): expected a "
                f"passage, whose last {self.unit} is the query."
            )
        unknown = list(dict.fromkeys(token for token in tokens if token not in self.numbers))
        if unknown:
            listed = ", ".join(map(self._hinted, unknown[:SAID])) + (" …" if len(unknown) > SAID else "")
            rare = f" {RARE} stands for a rare word." if RARE in self.numbers else ""
            raise QuestionError(
                f"not among the {len(self.vocabulary):,} {self.unit}s of {self.name}'s vocabulary: {listed}.{rare}"
            )
        return [self.numbers[token] for token in tokens]

    def encode(self, prompt: str) -> Tensor:
        """(tokens,): a prompt for a model."""
        import torch  # questions that totals answer need no PyTorch

        return torch.tensor(self.numbered(prompt))

    def decode(self, ids: Iterable[int]) -> str:
        """Tokens as text."""
        tokens = [self.vocabulary[number] for number in ids]
        if self.unit == "character":
            return "".join(tokens)
        return re.sub(rf" ?{LINE_END} ?", "\n", " ".join(tokens))

    def passage(self, position: int, width: int = 100, part: str = "train") -> Passage:
        """The token at a position, with up to `width` characters before and after it."""
        mine = self.part(part)
        if not 0 <= position < len(mine):
            raise QuestionError(f"position {position:,}: the {part} part has the positions 0 to {len(mine) - 1:,}.")
        # A token has at least one character, so `width` tokens are enough
        before = self.decode(mine.ids[max(0, position - width) : position].tolist())
        after = self.decode(mine.ids[position + 1 : position + 1 + width].tolist())
        if self.unit == "word":
            before, after = f"{before} ".lstrip(" "), f" {after}".rstrip(" ")
        token = self.vocabulary[int(mine.ids[position])]
        return Passage(position, mine.title(position), before[max(0, len(before) - width) :], token, after[:width])

    def _hinted(self, token: str) -> str:
        """An unknown token, with what may have been meant."""
        if self.unit == "character":
            near = [other for other in LOOKALIKES.get(token, "") if other in self.numbers]
        else:
            near = difflib.get_close_matches(token, self.vocabulary, n=2, cutoff=0.75)
        return f"{token!r}" + (f" (but {' and '.join(near)})" if near else "")


def split(text: str, unit: str) -> list[str]:
    """The tokens of a text."""
    if unit == "character":
        return list(text)
    if not text.strip():
        return []
    return text.replace("\n", f" {LINE_END} ").split()


def load_text(file: Path, unit: str = "character", *, test_share: float = 0.1) -> Text:
    """Read a text file in UTF-8; its end becomes the test part."""
    if unit not in UNITS:
        raise QuestionError(f"unit {unit!r}: expected one of {', '.join(map(repr, UNITS))}.")
    try:
        tokens = split(file.read_text(encoding="utf-8"), unit)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text: {error}.") from None
    test_tokens = int(len(tokens) * test_share)
    if len(tokens) - test_tokens < 2:
        raise DataError(f"{file} has {len(tokens)} {unit}s: expected a longer text.")
    vocabulary = tuple(dict.fromkeys(tokens))
    ids = token_ids(tokens, vocabulary)
    return Text(file.stem, unit, vocabulary, Part(ids[: len(ids) - test_tokens]), Part(ids[len(ids) - test_tokens :]))


def token_ids(tokens: Sequence[str], vocabulary: Sequence[str]) -> Ids:
    """The number of each token: its place in the vocabulary."""
    numbers = {token: number for number, token in enumerate(vocabulary)}
    return np.fromiter(map(numbers.__getitem__, tokens), np.int32, len(tokens))
