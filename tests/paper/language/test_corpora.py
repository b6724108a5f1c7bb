"""The paper's texts, as they are read."""

import pytest

from dualform_paper.language.corpora import load


@pytest.mark.data
def test_aesop():
    text = load("aesop")
    assert (text.unit, len(text.vocabulary), len(text.train), len(text.test)) == ("character", 74, 120_623, 20_399)
    assert text.decode(text.train.ids[:21].tolist()) == text.train.titles[0] == "THE WOLF AND THE LAMB"
    assert text.decode(text.test.ids[:8].tolist()) == text.test.titles[0] == "APPENDIX"
    whole, appendix = (text.decode(part.ids.tolist()) for part in (text.train, text.test))
    assert "as fast as his legs would carry him" in appendix.replace("\n", " ")
    assert "the Lamb a little distance below" in appendix
    assert text.train.title(whole.index("The Squirrel takes a look")) == "THE SQUIRREL IN SERVICE"
    assert text.train.title(whole.index("THE WOLF AND THE CAT")) == "THE WOLF AND THE CAT"
    assert len(text.train.titles) == 149


@pytest.mark.data
def test_wikitext():
    text = load("wikitext-2")
    assert (text.unit, len(text.vocabulary)) == ("word", 33_278)
    assert [len(text.part(part)) for part in ("train", "valid", "test")] == [2_088_628, 217_646, 245_569]
    assert [len(text.part(part).titles) for part in ("train", "valid", "test")] == [600, 60, 60]
    assert text.decode(text.train.ids[:8].tolist()) == "\n= Valkyria Chronicles III =\n\n"
    assert text.train.title(50_000) == "SMS Zrínyi"
    assert text.train.starts[0] == 1
