"""What is stored beside the recording of a language model."""

from dataclasses import replace

import numpy as np
import pytest

from dualform.errors import NotRecordedError, StoreDamagedError
from dualform.language.description import Description, read_description, write_description
from dualform.language.shape import Shape

SHAPE = Shape(vocabulary=9, embedding=4, state=6)


def test_a_description_is_read_as_it_was_written(story, tmp_path):
    write_description(tmp_path, Description(story, SHAPE))
    description = read_description(tmp_path)
    assert description.text.vocabulary == story.vocabulary
    assert description.text.unit == story.unit
    np.testing.assert_array_equal(description.text.train.ids, story.train.ids)
    np.testing.assert_array_equal(description.text.test.ids, story.test.ids)
    assert (description.layer, description.column, description.shape) == ("lstm", "text_position", SHAPE)


def test_titles_and_a_validation_part_are_kept(tmp_path, story):
    part = replace(story.train, starts=(0, 9), titles=("One", "Ænigma"))
    write_description(tmp_path, Description(replace(story, train=part, valid=story.test), SHAPE))
    text = read_description(tmp_path).text
    assert [text.train.title(n) for n in (0, 8, 9)] == ["One", "One", "Ænigma"]
    np.testing.assert_array_equal(text.valid.ids, story.test.ids)


def test_a_folder_without_a_description(tmp_path):
    with pytest.raises(NotRecordedError, match=r"has no text.json: it does not say which text was trained on"):
        read_description(tmp_path)


def test_a_damaged_description(tmp_path):
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(StoreDamagedError, match=r"text.json and text.safetensors cannot be read"):
        read_description(tmp_path)
