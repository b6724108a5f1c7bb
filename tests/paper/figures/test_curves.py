"""Curves: each class in its colour and place, however few weights it has."""

import numpy as np
import pytest
from groups import CLOTHES, DIGITS, LONG
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from dualform.figures.colours import colour_of
from dualform_paper.figures.curves import FILLED, draw, save
from dualform_paper.figures.results import LayerCurves
from figure_reading import legible, saved, texts


def curves(groups, count=500, scale=300.0, names=("layer-0", "layer-1", "layer-2")):
    random = np.random.default_rng(0)

    def weights():
        return np.sort(scale * random.gamma(4, size=count))[::-1]

    return [LayerCurves(name, groups, tuple(weights() for _ in groups)) for name in names]


def areas(axes):
    return [area for area in axes.collections if isinstance(area, PolyCollection)]


@pytest.mark.parametrize("groups", [DIGITS, CLOTHES, DIGITS + CLOTHES, CLOTHES + DIGITS + LONG])
def test_a_panel_for_each_layer_and_an_area_for_each_class(groups):
    figure = draw(curves(groups), "Attention weights")
    assert len(figure.axes) == 3
    assert {"layer-0", "layer-1", "layer-2"} <= {text.get_text() for text in texts(figure)}
    for axes in figure.axes:
        assert [to_hex(area.get_facecolor()[0]).upper() for area in areas(axes)] == [
            colour_of(group.label).upper() for group in groups
        ]
        assert axes.get_ylabel() == "attention weight\n(key · query)"
        assert [tick.get_text() for tick in axes.get_xticklabels()] == [str(group.label) for group in groups]


@pytest.mark.parametrize("groups", [DIGITS, DIGITS + CLOTHES, DIGITS + LONG, LONG])
@pytest.mark.parametrize("scale", [1e-3, 1e7])
def test_everything_can_be_read(groups, scale):
    legible(draw(curves(groups, scale=scale), "A title that is so long that it needs a second line, " * 2))


def test_datasets_stand_apart():
    figure = draw(curves(DIGITS + CLOTHES), "Attention weights")
    assert {"MNIST", "Fashion-MNIST"} <= {text.get_text() for text in texts(figure)}
    hatches = [area.get_hatch() for area in areas(figure.axes[0])]
    assert hatches[:10] == [None] * 10
    assert None not in hatches[10:]


def test_the_order_of_classes_is_that_of_their_datasets():
    mixed = tuple(group for pair in zip(DIGITS, CLOTHES, strict=True) for group in pair)
    (axes,) = draw(curves(mixed, names=["layer-0"]), "Attention weights").axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [str(label) for label in (*range(10), *range(10))]


def test_a_curve_goes_from_the_highest_weight_to_the_lowest():
    (layer,) = curves(DIGITS, names=["layer-0"])
    line = draw([layer], "Attention weights").axes[0].lines[0]
    assert (line.get_ydata()[[0, -1]] == layer.weights[0][[0, -1]]).all()
    assert line.get_xdata()[-1] - line.get_xdata()[0] == pytest.approx(FILLED * 499 / 500)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_weights_are_drawn_too(count):
    (full,) = curves(DIGITS, names=["layer-0"])
    (few,) = curves(DIGITS, count, names=["layer-0"])
    layer = LayerCurves("layer-0", DIGITS, full.weights[:5] + few.weights[5:])
    figure = draw([layer, few], "Attention weights")
    assert len(areas(figure.axes[0])) == (10 if count else 5)
    legible(figure)
    draw([LayerCurves("layer-0", (), ())], "Attention weights")


def test_negative_weights_are_within_the_limits():
    (layer,) = curves(DIGITS, names=["layer-0"])
    layer = LayerCurves("layer-0", DIGITS, tuple(weights - 3000 for weights in layer.weights))
    low, high = draw([layer], "Attention weights").axes[0].get_ylim()
    assert low < min(weights.min() for weights in layer.weights)
    assert high >= 0


def test_saved(tmp_path):
    layers = curves(DIGITS + CLOTHES)
    saved(lambda stem: save(layers, "Attention weights", stem), tmp_path)
    assert (tmp_path / "figure-0.5.svg").stat().st_size < 600_000
