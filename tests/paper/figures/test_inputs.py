"""The gallery: every test example with its class, the answer and a caption."""

import numpy as np
import pytest
from groups import CLOTHES, DIGITS

from dualform_paper.figures.inputs import draw, save
from dualform_paper.figures.results import Input
from figure_reading import legible, saved, texts

IMAGE = np.random.default_rng(0).uniform(size=(28, 28)).astype(np.float32)
CAPTION = "continual learning: interference of Fashion-MNIST's dresses, figures 21 and 22 of the paper"


def inputs(count):
    groups = (DIGITS + CLOTHES)[-count:] if count else ()
    return [Input(IMAGE, group.name, group.dataset, group.label, "ankle boot", CAPTION) for group in groups]


@pytest.mark.parametrize("count", [0, 1, 2, 6, 8, 20])
def test_each_is_shown_and_can_be_read(count):
    figure = draw(inputs(count), "Test examples")
    assert len(figure.axes) == count
    legible(figure)


def test_right_and_wrong_answers_are_told_apart_without_colour():
    written = {text.get_text() for text in texts(draw(inputs(2), "Test examples"))}
    assert {"✓ answered ankle boot", "✗ answered ankle boot"} <= written


def test_saved(tmp_path):
    saved(lambda stem: save(inputs(6), "Test examples", stem), tmp_path)
