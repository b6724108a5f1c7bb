"""Bars side by side: one colour for a series, one axis for a unit, numbers where there is room."""

import pytest
from matplotlib.colors import to_hex

from dualform.figures.colours import SERIES, colour_of
from dualform_paper.figures.bars import draw, save
from dualform_paper.figures.results import Bars, Series
from figure_reading import legible, saved, texts

LAYERS = ("layer-0", "layer-1", "layer-2")
OURS, PAPER = Series("ours", (18.3, 19.9, 24.0), (2.0, 1.0, 3.0)), Series("paper", (75.1, 78.8, 84.7), (0.0, 0.8, 1.1))
TABLE = [
    Bars("Wrong answers: the true class found", LAYERS, (OURS, PAPER), "found (%)"),
    Bars("Wrong answers: the model's answer found", LAYERS, (PAPER,), "found (%)"),
    Bars("Shares", LAYERS, (OURS, PAPER), "share"),
]


def test_a_series_has_one_colour_and_a_unit_one_axis():
    figure = draw(TABLE, "Table 1")
    first, second, _ = figure.axes
    assert to_hex(first.patches[3].get_facecolor()).upper() == SERIES[1]
    assert to_hex(second.patches[0].get_facecolor()).upper() == SERIES[1]
    assert first.get_ylim() == second.get_ylim()
    assert [axes.get_ylabel() for axes in figure.axes] == ["found (%)", "found (%)", "share"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours", "paper"]
    assert {"18.3", "84.7"} <= {text.get_text() for text in texts(figure)}


def test_a_class_has_its_own_colour():
    figure = draw([Bars("", LAYERS, (Series("dress", (1.0, 2.0, 3.0), label=3), OURS), "%")], "Classes")
    assert to_hex(figure.axes[0].patches[0].get_facecolor()).upper() == colour_of(3)
    assert to_hex(figure.axes[0].patches[3].get_facecolor()).upper() == SERIES[0]


@pytest.mark.parametrize("panels", [1, 3])
@pytest.mark.parametrize("groups", [0, 3, 20])
@pytest.mark.parametrize("series", [1, 4])
@pytest.mark.parametrize("name", ["layer-{}", "layers {} and 2 without 1", "incomprehensibilities-{} again"])
def test_everything_can_be_read(panels, groups, series, name):
    names = tuple(name.format(number) for number in range(groups))
    shown = tuple(Series(f"series {n}", tuple(80.0 - 9 * n + g for g in range(groups))) for n in range(series))
    legible(
        draw([Bars("Tested on both datasets", names, shown, "accuracy of the masked network (%)")] * panels, "Masks")
    )


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e4])
def test_negative_values_and_their_errors_are_within_the_limits(scale):
    series = Series("share", (-2 * scale, scale, 0.0), (0.5 * scale, 0.0, 0.0))
    figure = draw([Bars("", LAYERS, (series,), "share")], "Shares")
    legible(figure)
    assert figure.axes[0].get_ylim()[0] < -2.5 * scale


def test_saved(tmp_path):
    saved(lambda stem: save(TABLE, "Table 1", stem), tmp_path)
