"""What a reader can and cannot read on a figure."""

import itertools

import numpy as np
from matplotlib.image import imread
from matplotlib.path import Path
from matplotlib.transforms import Affine2D


def texts(figure):
    """All that is written on it."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [*axes.get_xticklabels(), *axes.get_yticklabels(), *axes.texts, axes.xaxis.label, axes.yaxis.label]
    return [text for text in found if text.get_text()]


def legible(figure):
    """No text leaves the figure or overlaps another."""
    figure.draw_without_rendering()
    shapes = [(text.get_text(), _corners(text)) for text in texts(figure)]
    for name, corners in shapes:
        assert (corners >= -0.5).all(), f"{name!r} leaves the figure"
        assert (corners <= figure.bbox.max + 0.5).all(), f"{name!r} leaves the figure"
    for (name, corners), (other, its) in itertools.combinations(shapes, 2):
        near = (corners.min(0) < its.max(0)).all() and (its.min(0) < corners.max(0)).all()
        overlap = near and Path(corners).intersects_path(Path(its), filled=True)
        assert not overlap, f"{name!r} overlaps {other!r}"


def _corners(text):
    """Of the text's box, which may be slanted, less the hair that letters keep from each other."""
    angle = text.get_rotation()
    slanted = angle % 90 != 0
    if slanted:
        text.set_rotation(0)
    box = text.get_window_extent()
    if slanted:
        text.set_rotation(angle)
    box = box.padded(-0.25, -0.75)
    corners = np.array([(box.x0, box.y0), (box.x1, box.y0), (box.x1, box.y1), (box.x0, box.y1), (box.x0, box.y0)])
    if slanted:
        assert text.get_rotation_mode() == "anchor"
        anchor = text.get_transform().transform(text.get_position())
        corners = Affine2D().rotate_deg_around(*anchor, angle).transform(corners)
    return corners


def saved(save, folder):
    """`save(stem)` writes a PNG that is not blank, and an SVG that is the same each time."""
    paths = save(folder / "figure-0.5")
    assert [path.name for path in paths] == ["figure-0.5.png", "figure-0.5.svg"]
    pixels = imread(paths[0])
    assert pixels.shape[1] == 1800
    assert pixels[..., :3].std() > 0.02, "blank"
    first = paths[1].read_bytes()
    assert save(folder / "figure-0.5")[1].read_bytes() == first, "the same results, the same file"
