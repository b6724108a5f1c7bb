"""The texts of the paper's language models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dualform.language.text import Part, Text, split, token_ids
from dualform_paper import texts


def load(name: str, folder: Path | None = None) -> Text:
    """Load "aesop" or "wikitext-2". folder: where datasets are."""
    files = texts.files(name, folder)
    return _aesop(files) if name == "aesop" else _wikitext(files)


def _aesop(files: dict[str, str]) -> Text:
    """Characters. Train: the fables; test: the appendix, which has shorter versions of some."""
    (book,) = files.values()
    middle = book.index("\nAPPENDIX\n") + 1
    vocabulary = tuple(sorted(set(book)))
    parts = []
    for text in (book[:middle], book[middle:]):
        # A heading is a line of capitals at the beginning or after blank lines
        found = [(m.start(1), m.group(1)) for m in re.finditer(r"(?:\A|\n{4})([A-ZÆ][^a-z\n]*)\n", text)]
        parts.append(Part(token_ids(text, vocabulary), *zip(*found, strict=True)))
    return Text("aesop", "character", vocabulary, *parts)


def _wikitext(files: dict[str, str]) -> Text:
    """Words, as WikiText-2 separates them, with a token for the end of each line."""
    tokens = {file: split(text, "word") for file, text in files.items()}
    train, valid, test = tokens.values()
    vocabulary = tuple(dict.fromkeys(train))
    parts = []
    for text, words in zip(files.values(), (train, valid, test), strict=True):
        lines = text.split("\n")
        ends = np.cumsum([len(line.split()) + 1 for line in lines])
        titles = [n for n in range(1, len(lines) - 1) if _is_title(lines[n - 1 : n + 2])]
        parts.append(
            Part(
                token_ids(words, vocabulary), [int(ends[n - 1]) for n in titles], [lines[n].strip(" =") for n in titles]
            )
        )
    return Text("wikitext-2", "word", vocabulary, parts[0], parts[2], parts[1])


def _is_title(lines: Sequence[str]) -> bool:
    """Whether the middle one of three lines is the title of an article: = Title =, alone."""
    before, line, after = lines
    return not before.strip() and not after.strip() and re.fullmatch(r" = [^=].* = ", line) is not None
