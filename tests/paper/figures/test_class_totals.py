"""Totals by class: bars in the classes' colours, the true class and the answer marked."""

import numpy as np
import pytest
from groups import CLOTHES, DIGITS, LONG
from matplotlib.colors import to_hex

from dualform.figures.colours import colour_of
from dualform_paper.figures.results import LayerTotals
from dualform_paper.figures.totals import draw, save
from figure_reading import legible, saved, texts


def totals(groups, scale=1e6, names=("layer-0", "layer-1", "layer-2"), signed=False):
    random = np.random.default_rng(0)
    low = -1.0 if signed else 0.2
    return [
        LayerTotals(name, groups, tuple(scale * random.uniform(low, 1, len(groups))), name == "layer-0")
        for name in names
    ]


def marks(axes):
    return [line for line in axes.lines if line.get_marker() == "v"]


@pytest.mark.parametrize("groups", [DIGITS, DIGITS + CLOTHES])
def test_a_bar_for_each_class_in_its_colour(groups):
    layers = totals(groups)
    figure = draw(layers, "Totals", target=groups[6], answer=groups[6])
    assert len(figure.axes) == 3
    for axes, layer in zip(figure.axes, layers, strict=True):
        bars = [bar for bar in axes.patches if bar.get_fill()]
        assert [to_hex(bar.get_facecolor()).upper() for bar in bars] == [colour_of(g.label).upper() for g in groups]
        assert [bar.get_height() for bar in bars] == list(layer.totals)


def test_the_axis_says_what_is_summed():
    figure = draw(totals(DIGITS), "Totals", target=DIGITS[6], answer=DIGITS[6])
    assert [axes.get_ylabel() for axes in figure.axes] == ["sum of |weights|", "sum of weights", "sum of weights"]
    figure = draw(totals(DIGITS), "Totals", target=DIGITS[6], answer=DIGITS[6], quantity="contribution")
    assert {axes.get_ylabel() for axes in figure.axes} == {"contribution"}


def test_true_class_and_answer_are_marked_and_named():
    figure = draw(totals(DIGITS + CLOTHES), "Totals", target=DIGITS[1], answer=CLOTHES[3])
    target, answer = marks(figure.axes[0])
    assert target.get_markerfacecolor() != answer.get_markerfacecolor()
    assert target.get_xdata()[0] == 1
    assert answer.get_xdata()[0] > 13
    assert "▼ true class: MNIST 1      ▽ answer: Fashion-MNIST dress (3)" in {t.get_text() for t in texts(figure)}


def test_a_class_that_is_not_shown_is_not_marked():
    figure = draw(totals(DIGITS), "Totals", target=DIGITS[1], answer=CLOTHES[3])
    assert len(marks(figure.axes[0])) == 1


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("groups", [DIGITS, DIGITS + CLOTHES, DIGITS + LONG])
@pytest.mark.parametrize("scale", [0.01, 1e8])
def test_everything_can_be_read(groups, signed, scale):
    what = {"target": groups[0], "answer": groups[-1], "quantity": "contribution to the answer's logit"}
    legible(draw(totals(groups, scale, signed=signed), "Totals", **what))


def test_nothing_to_sum_is_drawn_too():
    draw([LayerTotals("layer-0", (), (), True)], "Totals", target=DIGITS[1], answer=DIGITS[1])
    draw([LayerTotals("layer-0", DIGITS, (0.0,) * 10, True)], "Totals", target=DIGITS[1], answer=DIGITS[1])


def test_saved(tmp_path):
    layers = totals(DIGITS + CLOTHES, signed=True)
    saved(lambda stem: save(layers, "Totals", stem, target=DIGITS[1], answer=CLOTHES[3]), tmp_path)
