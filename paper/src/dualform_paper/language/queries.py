"""What is asked: the paper's queries of Tables 2 to 7, found in the texts by search, and others chosen by a rule.

The token that a table highlights is in brackets here. The text of the paper that we have keeps the highlights of Tables 3 and 4 only; they
are the last token that the query and its passages have in common, so the same was taken in the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualform.errors import DataError
from dualform.language.text import RARE, Ids, Text

PROMPT = {"character": 100, "word": 30}
"""How many tokens a prompt has; more where the paper shows more."""


@dataclass(frozen=True)
class Table:
    """A table of the paper: a query, and the training passages with the most attention, best first."""

    number: int
    shared: str
    """What the paper sees in all of them."""
    query: str
    top: tuple[str, ...]
    part: str = "test"


TABLES = {
    "aesop": (
        Table(
            2,
            "doing something fast",
            "Wolf was glad to take himself off as fast as [h]is legs would carry him.",
            (
                "and running as fast as [h]e could, he found her comfortably dozing at their goal.",
                "and kept on eating them as fast as [h]e could.",
                "The poor Mule made room for him as fast as [h]e could, and the Horse went proudly on his way.",
            ),
        ),
        Table(
            3,
            "a + adjective or single + a word that begins with d",
            "The Wolf stood high up the stream and the Lamb a little [d]istance below.",
            (
                "they found that he slew more of them in a single [d]ay than the Kite could",
                "yet when I hear the bark of but a single [d]og, I faint with terror",
                "which was parched by heat, but did not let fall a single [d]rop to refresh it.",
            ),
        ),
        Table(
            4,
            "at + something about time or counting",
            "The Squirrel takes a look at them—he can do no more. At[ ]one time he is called away",
            (
                "Mere size is nothing. At[ ]most it can only frighten little girls and boys",
                "At times he would snap at his prey, and at[ ]times play with him and lick him with his tongue",
                "keeping a safe distance away, and at[ ]last one by one hopped upon it.",
            ),
            part="train",
        ),
    ),
    "wikitext-2": (
        Table(
            5,
            "contributions of somebody to something",
            "her painting was printed opposite that of Tommy Watson , who was by this time famous , particularly for his "
            "[contribution] to the design of a new building for",
            (
                "In February 1960 , for his [contribution] to the film industry , Olivier was inducted into the Hollywood Walk of Fame",
                "by the Singapore Police Force in recognition for his [contribution] as consultant",
                "Colby did not credit Weizenbaum for his [contribution] to the program .",
            ),
        ),
        Table(
            6,
            "main, secondary, primary for principal",
            "[Her] principal role was for combat in the English Channel and other European waters",
            (
                "Her sailing rig also was removed . [Her] main battery guns were replaced with new",
                "one turret amidships between the two funnels . [Her] secondary armament consisted of fourteen 15 cm",
                "single mounts . [Her] primary offensive weapon was her five 450 mm",
            ),
        ),
        Table(
            7,
            "somebody rating or commenting on something",
            "IGN 's Matt gave \" The \" a score of 9 @.@ 4 out of 10 , describing it [as] \" a , in storytelling \" which",
            (
                "Den of Geek writer named it the \" finest \" stand @-@ alone episode of the second season , describing it [as] \" a "
                "genuinely creepy 45 @-@ minute horror movie",
                "it was the \" most impressive \" song on the album , describing it [as] a \" gorgeously sparse prayer built around "
                "Adam Clayton 's bassline",
                "James from magazine gave the film 2 out of 5 stars , describing it [as] \" ' Alien ' meets ' V '",
            ),
        ),
    ),
}  # fmt: skip
"""By text."""
VARIANTS = {
    "wikitext-2": (
        Table(
            6,
            "main, secondary, primary for principal",
            "Her [principal] role was for combat in the English Channel and other European waters",
            (
                "Her sailing rig also was removed . Her [main] battery guns were replaced with new",
                "one turret amidships between the two funnels . Her [secondary] armament consisted of fourteen 15 cm",
                "single mounts . Her [primary] offensive weapon was her five 450 mm",
            ),
        ),
    ),
}
"""Tables that can be read in another way: the caption of Table 6 is about these words, whose highlights we do not know."""


@dataclass(frozen=True)
class Query:
    """A token of a text, with what the model reads before it."""

    part: str
    begin: int
    position: int
    """The token that asks: the last one of the prompt."""
    table: Table | None = None
    theirs: tuple[int, ...] = ()
    """Where in the training part the table's passages stand."""

    def prompt(self, text: Text) -> Ids:
        """(tokens,)"""
        return text.part(self.part).ids[self.begin : self.position + 1]


def papers(text: Text, *, variants: bool = False) -> list[Query]:
    """The paper's queries for a text, where it has any. variants: also those tables that can be read in another way."""
    tables = TABLES.get(text.name, ())
    if variants:
        tables = (*tables, *VARIANTS.get(text.name, ()))
    search = {part: Search(text, part) for part in ("train", "test")} if tables else {}
    queries = []
    for table in tables:
        first, position = search[table.part](table.query)
        theirs = tuple(search["train"](words)[1] for words in table.top)
        begin = min(first, _begin(text, position))
        queries.append(Query(table.part, begin, position, table, theirs))
    return queries


def chosen(text: Text, count: int) -> list[Query]:
    """Tokens spread evenly over the test part: in the middle of each of `count` stretches, or the next one that ends a word.

    In words: the next one of letters, so no mark and no rare word.
    """
    ids, found = text.test.ids, list[Query]()
    for number in range(count):
        position = (2 * number + 1) * len(ids) // (2 * count)
        while position < len(ids) and not _ends_word(text, ids, position):
            position += 1
        if position < len(ids) and (not found or position > found[-1].position):
            found.append(Query("test", _begin(text, position), position))
    return found


class Search:
    """Finds words in a part of a text.

    Blanks and line ends are alike, and rare words (<unk>), which the paper does not print, may stand between any two.
    """

    def __init__(self, text: Text, part: str):
        ids, joint = text.part(part).ids, "" if text.unit == "character" else " "
        self._where = f"{text.name} has no {{!r}} in its {part} part."
        self._content = joint.join(np.array(text.vocabulary, dtype=object)[ids])
        self._ends = np.cumsum(np.array([len(token) + len(joint) for token in text.vocabulary])[ids])

    def __call__(self, words: str) -> tuple[int, int]:
        """The place of the first token, and of the one that is in brackets."""
        before, token, after = re.fullmatch(r"(.*)\[(.+)\](.*)", words, re.S).groups()  # type: ignore[union-attr]
        match = re.search(f"{_loosely(before)}(?P<token>{_loosely(token)}){_loosely(after)}", self._content)
        if match is None:
            raise DataError(self._where.format(words))
        first, marked = np.searchsorted(self._ends, [match.start(), match.start("token")], side="right")
        return int(first), int(marked)


def _begin(text: Text, position: int) -> int:
    """Where the prompt begins whose last token is at a position."""
    return max(0, position + 1 - PROMPT[text.unit])


def _loosely(words: str) -> str:
    """A pattern for words."""
    pieces: Sequence[str] = re.split(r"(\s+)", words)
    return "".join(rf"(?:\s+{RARE})*\s+" if piece.isspace() else re.escape(piece) for piece in pieces)


def _ends_word(text: Text, ids: Ids, position: int) -> bool:
    token = text.vocabulary[int(ids[position])]
    if text.unit == "word":
        return token.isalpha()
    following = text.vocabulary[int(ids[position + 1])] if position + 1 < len(ids) else " "
    return token.isalpha() and not following.isalpha()
