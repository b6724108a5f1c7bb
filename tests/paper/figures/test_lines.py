"""Lines: told apart by more than their colours, with bands where there are any."""

import numpy as np
import pytest

from dualform.figures.colours import FAINT, SERIES, colour_of
from dualform_paper.figures.lines import draw, save
from dualform_paper.figures.results import Line, Lines
from figure_reading import legible, saved, texts

STEPS = np.arange(0, 3000, 100)
RISE = Line("right class", STEPS, STEPS / 1000, STEPS / 1000 - 0.1, STEPS / 1000 + 0.1)
CHANCE = Line("chance", np.array([0, 3000]), np.array([1.0, 1.0]), reference=True)
RANKS = 2 ** np.arange(10)


def test_lines_bands_and_what_they_are_compared_with():
    figure = draw([Lines("layer-0", "step", "share", (CHANCE, RISE, Line("others", STEPS, STEPS * 0.5)))], "Recency")
    (axes,) = figure.axes
    assert [line.get_color() for line in axes.lines] == [FAINT, *SERIES[:2]]
    assert len({line.get_linestyle() for line in axes.lines}) >= 2
    assert len(axes.collections) == 1
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "share")
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"right class", "others", "chance"}


def test_a_class_has_its_own_colour_in_every_panel():
    panels = [
        Lines("a", "layer", "share", (Line("dress", np.arange(3), np.arange(3), label=3), RISE)),
        Lines("b", "layer", "share", (RISE, Line("dress", np.arange(3), np.arange(3), label=3))),
    ]
    first, second = draw(panels, "Depth").axes
    assert first.lines[0].get_color() == second.lines[1].get_color() == colour_of(3)
    assert first.lines[1].get_color() == second.lines[0].get_color() == SERIES[0]


def test_layers_are_whole_numbers():
    figure = draw([Lines("", "layer", "share", (Line("a", np.arange(3), np.arange(3) / 7),))], "Depth")
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0", "1", "2"]


@pytest.mark.parametrize("panels", [1, 2, 3, 5])
@pytest.mark.parametrize("span", [0.5, 2.0, 12.0])
@pytest.mark.parametrize("log", [False, True])
def test_everything_can_be_read(panels, span, log):
    lines = tuple(
        Line(f"layer-{n} with a long name", RANKS, 10.0 ** (-span * np.arange(10) / 9 - n / 10)) for n in range(7)
    )
    figure = draw(
        [Lines("Error of the weights by rank", "rank", "relative error of the weights by rank", lines, log, log)]
        * panels,
        "SVD",
    )
    assert len(figure.axes) == panels
    legible(figure)


def test_nothing_to_draw_is_drawn_too():
    assert "Empty" in {text.get_text() for text in texts(draw([Lines("none", "x", "y", ())], "Empty"))}
    draw([], "Empty")


def test_saved(tmp_path):
    panel = Lines("layer-0", "step", "share", (CHANCE, RISE))
    saved(lambda stem: save([panel] * 3, "Recency", stem), tmp_path)
