"""Texts as numbers, passages, and messages about prompts that cannot be read."""

import pytest

from dualform.errors import DataError, QuestionError
from dualform.language.text import Part, Text, load_text


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "crow.txt"
    path.write_text("the crow saw the cheese\nthe fox saw the crow 🧀 naïve\n" * 4)
    return load_text(path, "word", test_share=0.25)


@pytest.fixture
def characters(tmp_path):
    path = tmp_path / "crow.txt"
    path.write_text("“Don’t,” said the Crow — 🧀 naïve\n" * 4)
    return load_text(path)


def test_decoding_undoes_encoding(words, characters):
    for text, prompt in ((words, "the crow\nsaw naïve"), (characters, "Don’t 🧀\nna")):
        assert text.decode(text.encode(prompt).tolist()) == prompt


def test_a_passage_is_what_stands_around_a_token(words, characters):
    found = words.passage(1, 10)
    assert (found.before, found.token, found.after) == ("the ", "crow", " saw the c")
    assert words.passage(5, 100).token == "<eos>"
    found = characters.passage(25, 2)
    assert (found.before, found.token, found.after) == ("— ", "🧀", " n")
    assert characters.passage(0, 3).before == ""
    assert characters.passage(0, 0).after == ""
    last = len(characters.train) - 1
    assert characters.passage(last, 5).after == ""
    with pytest.raises(QuestionError, match=r"position 999: the train part has the positions 0 to"):
        words.passage(999)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "the prompt is empty: expected at least one word"),
        (" \n ", "the prompt is empty"),
        ("the crown", r"not among the \d+ words of crow's vocabulary: 'crown' \(but crow\)\.$"),
        ("a b c d e f g", r"'a', 'b', 'c', 'd', 'e' …"),
        ("the " * 1000, r"the prompt has 1,000 words, more than the training text \(42\)"),
    ],
)
def test_words_that_cannot_be_read(words, prompt, said):
    with pytest.raises(QuestionError, match=said):
        words.encode(prompt)


def test_characters_that_cannot_be_read(characters):
    with pytest.raises(QuestionError, match=r"not among the .* characters of crow's vocabulary: \"'\" \(but ’\), 'ß'"):
        characters.encode("don't ß")


def test_titles():
    part = Part([0] * 10, (2, 5), ("one", "two"))
    assert [part.title(n) for n in (0, 1, 2, 4, 5, 9)] == ["", "", "one", "one", "two", "two"]


def test_a_part_that_is_not_there(words):
    with pytest.raises(QuestionError, match="crow has no part 'valid'"):
        words.part("valid")


def test_a_text_file(tmp_path, words):
    assert isinstance(words, Text)
    assert len(words.train) + len(words.test) == 4 * 14
    with pytest.raises(QuestionError, match="unit 'byte': expected one of 'character', 'word'"):
        load_text(tmp_path / "crow.txt", "byte")
    with pytest.raises(DataError, match=r"nowhere.txt cannot be read"):
        load_text(tmp_path / "nowhere.txt")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    with pytest.raises(DataError, match=r"latin.txt cannot be read as UTF-8"):
        load_text(tmp_path / "latin.txt")
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(DataError, match="has 1 characters: expected a longer text"):
        load_text(tmp_path / "short.txt")
