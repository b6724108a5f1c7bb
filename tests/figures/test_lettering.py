"""Words are as wide as we think, and fit where they are put."""

import pytest
from matplotlib import rc_context

from dualform.figures.lettering import LARGE, SMALL, shortened, width_of, wrapped
from dualform.figures.sheet import FONT, Sheet


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("bold", [False, True])
def test_the_width_is_that_of_the_drawn_words(size, bold):
    words = "ankle boot, Fashion-MNIST"
    with rc_context(FONT):
        text = Sheet(1.0).text(0, 0, words, size=size, weight="bold" if bold else "normal")
        drawn = text.get_window_extent().width / text.get_figure().dpi
    assert width_of(words, size, bold=bold) == pytest.approx(drawn, rel=0.05)


def test_shortened_words_fit():
    assert shortened("ankle boot", 2.0) == "ankle boot"
    cut = shortened("the greater spotted ankle boot", 0.8)
    assert cut.endswith("…")
    assert 0.5 < width_of(cut) <= 0.8


def test_wrapped_lines_fit_and_lose_nothing():
    words = "continual learning: interference of Fashion-MNIST's dresses"
    lines = wrapped(words, 1.2)
    assert " ".join(lines) == words
    assert all(width_of(line) <= 1.2 for line in lines)
    assert wrapped("", 1.0) == []
    assert wrapped("incomprehensibilities", 0.1) == ["incomprehensibilities"]
