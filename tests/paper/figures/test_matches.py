"""Top matches: every image in its class's colour, with its numbers."""

import numpy as np
import pytest
from groups import CLOTHES, DIGITS, LONG
from matplotlib.colors import to_hex

from dualform.figures.colours import colour_of
from dualform_paper.figures.matches import draw, save
from dualform_paper.figures.results import LayerMatches, Match
from figure_reading import legible, saved, texts

RANDOM = np.random.default_rng(0)
IMAGE = RANDOM.uniform(size=(28, 28)).astype(np.float32)


def matches(groups, count, layers=3):
    def one(number):
        group = groups[number % len(groups)]
        weight = float(RANDOM.uniform(-5e4, 5e5))
        return Match(group.dataset, group.label, group.name, 59_000, 9_000 + number, 11 + number, weight, IMAGE)

    row = tuple(one(number) for number in range(count))
    return [LayerMatches(f"layer-{number}", row, row) for number in range(layers)]


@pytest.mark.parametrize("count", [1, 3, 10])
def test_each_match_is_shown_in_its_colour(count):
    layers = matches(DIGITS + CLOTHES, count)
    figure = draw(layers, IMAGE, "Top matches")
    shown = figure.axes[1:]
    assert len(shown) == 2 * 3 * count
    expected = [colour_of(match.label) for layer in layers for match in (*layer.by_slot, *layer.by_image)]
    assert [to_hex(axes.spines["left"].get_edgecolor()).upper() for axes in shown] == [c.upper() for c in expected]
    written = {text.get_text() for text in texts(figure)}
    assert {"layer-0", "layer-2", "step 9000", "11 visits"} <= written


@pytest.mark.parametrize("groups", [DIGITS, DIGITS + CLOTHES, CLOTHES[::-1], LONG])
@pytest.mark.parametrize("count", [0, 3, 4, 10])
def test_everything_can_be_read(groups, count):
    legible(draw(matches(groups, count, layers=2), IMAGE, "Top matches"))


def test_no_picture_hides_another():
    figure = draw(matches(DIGITS, 3), IMAGE, "Top matches")
    boxes = [axes.get_position() for axes in figure.axes]
    assert not any(one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[n + 1 :])


def test_saved(tmp_path):
    layers = matches(DIGITS + CLOTHES, 8)
    saved(lambda stem: save(layers, IMAGE, "Top matches", stem), tmp_path)
