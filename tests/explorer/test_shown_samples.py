"""Samples as plain data."""

import base64
import io

import matplotlib.image
import numpy as np
import pytest
import torch

from dualform.errors import QuestionError
from dualform.explorer.showing import data_address, shown


def pixels(found):
    raw = base64.b64decode(found.source.removeprefix("data:image/png;base64,"))
    return (matplotlib.image.imread(io.BytesIO(raw), format="png") * 255).round().astype(np.uint8)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_a_picture_comes_back(shape):
    picture = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    assert np.array_equal(pixels(shown(picture)), picture)


@pytest.mark.parametrize(
    ("sample", "kind", "size"),
    [
        (torch.rand(1, 28, 28), "image", (28, 28)),
        (torch.rand(3, 8, 9), "image", (9, 8)),
        (np.zeros((32, 32, 3), np.float32), "image", (32, 32)),
        (torch.rand(784), "image", (28, 28)),
        (torch.rand(64), "image", (8, 8)),
        (torch.rand(7), "vector", (0, 0)),
        (torch.rand(16), "vector", (0, 0)),
        ("some text", "text", (0, 0)),
        (np.zeros((300, 400), np.uint8), "image", (100, 75)),
    ],
)
def test_a_guess_by_shape(sample, kind, size):
    found = shown(sample)
    assert found.kind == kind
    assert (found.width, found.height) == size


def test_what_the_user_says_counts():
    assert shown(torch.rand(64), "vector").kind == "vector"
    assert shown(torch.rand(16), "image").width == 4
    assert shown(torch.arange(3), "text").text == "[0, 1, 2]"
    assert shown(torch.rand(64), lambda x: f"sum {x.sum():.0f}").kind == "text"
    assert shown(5, lambda x: np.ones((2, 2))).kind == "image"
    with pytest.raises(QuestionError, match='"image", "vector", "text"'):
        shown(torch.rand(3), "film")


def test_ink_is_dark_on_paper():
    picture = np.zeros((8, 8), np.uint8)
    picture[2, 2] = 255
    found = shown(picture, ink=True)
    assert found.ink
    assert pixels(found)[2, 2] == 0


def test_numbers_that_are_none():
    assert shown(torch.tensor([1.0, float("nan"), float("inf")])).numbers == [1.0, 0.0, 0.0]
    assert shown(torch.full((8, 8), float("nan"))).kind == "image"


def test_long_things_are_cut():
    assert len(shown("x" * 10_000).text) == 2000
    assert len(shown(torch.zeros(5000)).numbers) == 256


def test_an_address_is_a_png():
    assert data_address(np.zeros((1, 1), np.uint8)).startswith("data:image/png;base64,iVBOR")
