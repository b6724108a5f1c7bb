"""The figure: everything is on it, nothing hides anything, and it is drawn from results alone."""

import numpy as np
import pytest

from dualform.figures.colours import CLASSES, colour_of, ink_on
from dualform.figures.results import Explained, LayerSources, LogitSplit, Source
from dualform.figures.sheet import WIDTH
from dualform.figures.sources import draw, save
from figure_reading import legible, texts


def explained(label=8, answer=5, top=8, scale=1.0):
    random = np.random.default_rng(0)

    def picture():
        return random.uniform(0, 2, size=(8, 8)).astype(np.float32)

    def layer(name):
        sources = [Source(i, int(random.integers(10)), 290 + i, scale * (200 - i), picture()) for i in range(top)]
        return LayerSources(name, tuple(sources), tuple(scale * random.normal(size=10) * 1e5))

    def split(unit):
        parts = tuple((scale * random.normal(size=10) * 80).tolist())
        return LogitSplit(unit, 1.5, parts, 1.5 + sum(parts))

    units = [answer] if answer == label else [answer, label]
    layers = tuple(layer(name) for name in ("0", "2", "4"))
    return Explained(1234, picture(), label, answer, layers, tuple(split(unit) for unit in units))


BOTH = [explained(answer=8), explained()]


def test_all_numbers_are_on_it():
    written = {text.get_text() for text in texts(draw(BOTH))}
    for one in BOTH:
        assert f"Test digit {one.label}, answered {one.answer}" in written
        for split in one.splits:
            assert f"{split.total:+.4f}".replace("-", "−") in written
            assert {f"{part:+.2f}".replace("-", "−") for part in split.parts} <= written
        for layer in one.layers:
            assert f"layer {layer.layer}" in written
            assert {f"step {source.step}" for source in layer.top} <= written


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_no_text_overlaps_another_or_leaves_the_figure(scale):
    legible(draw([explained(answer=8, scale=scale), explained(scale=scale)]))


def test_saved_as_png_and_svg(tmp_path):
    paths = save(BOTH, tmp_path / "sources")
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert paths[0].stat().st_size < 400_000
    first = paths[1].read_bytes()
    assert save(BOTH, tmp_path / "sources")[1].read_bytes() == first, "the same results, the same file"


@pytest.mark.parametrize("top", [0, 1, 3])
def test_few_examples_are_drawn_too(top):
    figure = draw([explained(top=top)])
    assert figure.get_figwidth() == WIDTH


def test_colours_are_distinct_and_readable():
    assert len(set(CLASSES)) == 10
    assert colour_of(13) == colour_of(3)
    assert {ink_on(label) for label in range(10)} == {"#1B1F24", "#FFFFFF"}
