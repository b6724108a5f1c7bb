"""Two levels of retrieval: everything can be read, whatever the tokens."""

import numpy as np
import pytest

from dualform_paper.figures.results import Reading, Retrieval, Spot
from dualform_paper.figures.retrieval import draw, save
from figure_reading import legible, saved, texts


def found(tokens, heads=2, spots=3):
    shares = np.linspace(0, 1, heads * len(tokens)).reshape(heads, -1)
    some = tuple(
        Spot("what stands before, " * 4, tokens[-1], ", and after " * 8, "A LONG TITLE " * 4, 42.0 - n)
        for n in range(spots)
    )
    attended = {place: Reading(f"token {place}: 10 %", some) for place in range(min(3, len(tokens) - 1))}
    return Retrieval(tuple(tokens), shares, Reading("asks", some), attended, tuple(Reading(f"head {h}", some) for h in range(heads)))  # fmt: skip


@pytest.mark.parametrize("tokens", ["The Wolf stood high up the stream and the Lamb a little d", "a ␣", "x"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("spots", [0, 3])
def test_everything_can_be_read(tokens, heads, spots):
    legible(draw(found(tokens, heads, spots), "Block 2, asked at the end of a prompt"))


def test_a_line_has_the_token_in_the_middle_and_no_line_ends():
    one = Retrieval(
        ("d",), np.ones((1, 1)), Reading("d", (Spot("in a\nsingle ", "d", "og, I\n\nfaint", "FAWN", 3.0),)), {}, ()
    )
    written = [text.get_text() for text in texts(draw(one, "Title"))]
    assert {"in a single ", "og, I faint", "FAWN", "3.0"} <= set(written)


def test_files(tmp_path):
    saved(lambda stem: save(found("a little d"), "Title", stem), tmp_path)
