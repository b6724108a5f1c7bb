"""The paper's queries are found in texts whatever the line ends and rare words; the rule for others."""

import pytest
from made import made

from dualform.errors import DataError
from dualform_paper.language import corpora, queries
from dualform_paper.language.queries import TABLES, Query, Search, chosen, papers


@pytest.mark.parametrize(
    ("book", "words", "first", "marked"),
    [
        ("and the Lamb a\nlittle distance", "Lamb a little [d]istance", 8, 22),
        ("no more. At\none time", "more. At[ ]one", 3, 11),
        ("sing (a+b)*", "(a[+]b)*", 5, 7),  # nothing of a query is read as a pattern
        ("dd", "[d]d", 0, 0),
    ],
)
def test_characters_are_found_across_line_ends(book, words, first, marked):
    assert Search(made(book, "character"), "test")(words) == (first, marked)


@pytest.mark.parametrize(
    ("article", "words", "first", "marked"),
    [
        ("her work . Her principal role was", "Her [principal] role", 3, 4),
        ("Matt <unk> <unk> gave \" The <unk> \" a score", "Matt gave \" [The] \" a", 0, 5),
        ("<unk> for his contribution\nto", "[for] his", 1, 1),
    ],
)  # fmt: skip
def test_words_are_found_across_rare_ones(article, words, first, marked):
    assert Search(made(article, "word"), "test")(words) == (first, marked)


def test_what_is_not_there_is_named():
    with pytest.raises(DataError, match=r"made has no 'a \[fox\] ran' in its test part"):
        Search(made("a fox sat", "word"), "test")("a [fox] ran")


def test_a_prompt_ends_with_the_token_that_asks():
    text = made("a b c d e", "word")
    assert text.decode(Query("test", *Search(text, "test")("b c [d]")).prompt(text).tolist()) == "b c d"


@pytest.mark.parametrize(("shown", "tokens"), [(3, 30), (40, 40)])
def test_a_prompt_of_the_paper_is_at_least_what_it_shows(shown, tokens, monkeypatch):
    words = [f"w{n}" for n in range(60)]
    text = made(" ".join(words), "word", "x y z")
    query = " ".join(words[50 - shown + 1 : 50]) + " [w50] w51"
    monkeypatch.setitem(queries.TABLES, "made", (queries.Table(5, "", query, ("[y] z",)),))
    (asked,) = papers(text)
    assert (asked.position, len(asked.prompt(text)), asked.theirs) == (50, tokens, (1,))


def test_chosen_tokens_are_spread_and_end_words():
    book = "ab cde. " * 50
    text = made(book, "character")
    asked = chosen(text, 5)
    assert [one.position for one in asked] == [
        41,
        121,
        201,
        281,
        361,
    ]  # the middles are 40, 120, …: an a that a b follows
    assert all(book[one.position].isalpha() and not book[one.position + 1].isalpha() for one in asked)
    assert [len(one.prompt(text)) for one in asked] == [42, 100, 100, 100, 100]


def test_chosen_words_are_words():
    text = made("<unk> , 9 @-@ fox " * 20, "word")
    assert {text.vocabulary[one.prompt(text)[-1]] for one in chosen(text, 3)} == {"fox"}


@pytest.mark.parametrize("article", ["9 " * 10, ""])
def test_a_text_without_words_is_not_asked(article):
    assert chosen(made(article, "word"), 4) == []


def test_no_token_is_chosen_twice():
    assert len(chosen(made("fox " + ", " * 30 + "fox", "word"), 9)) == 1


@pytest.mark.data
@pytest.mark.parametrize("name", TABLES)
def test_the_papers_queries_and_passages_are_in_the_texts(name):
    text = corpora.load(name)
    asked = papers(text, variants=True)
    assert [one.table.number for one in asked] == ([2, 3, 4] if name == "aesop" else [5, 6, 7, 6])
    assert [len(one.theirs) for one in asked] == [3] * len(asked)
    for one in asked:
        for part, position, words in [
            (one.part, one.position, one.table.query),
            *(("train", position, words) for position, words in zip(one.theirs, one.table.top, strict=True)),
        ]:
            assert f"[{text.passage(position, part=part).token}]" in words
        assert len(set(one.theirs)) == len(one.table.top)


@pytest.mark.data
def test_the_third_passage_of_table_7_and_the_other_reading_of_table_6():
    text = corpora.load("wikitext-2")
    *_, table_7, other_6 = papers(text, variants=True)
    assert table_7.theirs[2] == 1_109_034
    assert [text.passage(position).token for position in other_6.theirs] == ["main", "secondary", "primary"]
    assert text.passage(other_6.position, part="test").token == "principal"
