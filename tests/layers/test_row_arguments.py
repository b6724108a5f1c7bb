from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dualform.layers.row_arguments import Placement, holds_rows, move_rows, options_in, placements, tensors_in

ORDER = np.array([2, 0, 1, 3])


@dataclass
class Fields:
    x: torch.Tensor
    scale: float = 1.0


class State(NamedTuple):
    hidden: torch.Tensor
    count: int


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def test_tensors_are_found_in_arguments_of_any_form():
    a, b, c, d = torch.zeros(1), torch.ones(1), torch.ones(2), torch.ones(3)
    found = tensors_in(((a, [b]), {"c": c, "d": 3, "e": Fields(d)}))
    assert [id(tensor) for tensor in found] == [id(a), id(b), id(c), id(d)]


def test_options_are_what_may_switch_the_arrangement():
    assert options_in(((torch.zeros(2), True, "time first"), {"flip": None, "n": 3})) == (
        True, "time first", "flip", None, "n"
    )  # fmt: skip
    assert options_in((["some", "texts"], "x" * 99)) == ()


def test_placements_prefer_the_first_axis():
    batch, state, mask, weight = torch.zeros(4, 7), torch.zeros(2, 4, 5), torch.zeros(4, 4), torch.zeros(9)
    first, *others = placements(((batch, state, mask, weight), {}), 4)
    assert first.axes == (0, 1, 0, None)
    assert others[0].axes == (0, 1, None, None)


def test_the_axis_that_the_user_names():
    [found] = placements(((torch.zeros(4, 4), torch.zeros(7)), {}), 4, axis=1)
    assert found.axes == (1, None)


def test_a_list_with_an_entry_for_each_row_comes_first():
    """Images of as many channels as there are rows would fit by their first axis, too."""
    images = [torch.zeros(4, 2, 2) for _ in range(4)]
    found = placements(((images, torch.zeros(4, 3)), {}), 4)
    assert found[0] == Placement((None, None, None, None, 0), rows_of_lists=4)
    assert found[1] == Placement((0, 0, 0, 0, 0))


def test_arguments_without_rows_have_no_placement():
    assert placements(((torch.zeros(3, 5), [1, 2]), {}), 4) == []


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        (((torch.zeros(4, 2),), {}), True),
        (((torch.zeros(2, 4),), {}), False),
        (((["a", "b", "c", "d"],), {}), True),
        (((), {"x": {"y": torch.zeros(4)}}), True),
        ((("word",), {}), False),
    ],
)
def test_whether_arguments_hold_the_rows(arguments, holds):
    assert holds_rows(arguments, 4) == holds


def moved(value, placement):
    [found], _ = move_rows(((value,), {}), placement, ORDER)
    return found


def test_tensors_are_moved_along_their_axis():
    x = numbers(3, 4)
    assert torch.equal(moved(x, Placement((1,))), x[:, ORDER])
    assert moved(x, Placement((None,))) is x


def test_containers_keep_their_types():
    x = numbers(4, 2)
    placement = Placement((0,))
    assert torch.equal(moved({"x": x}, placement)["x"], x[ORDER])
    assert type(moved(OrderedDict(x=x), placement)) is OrderedDict
    assert type(moved([x], placement)) is list
    found = moved(State(x, 3), placement)
    assert torch.equal(found.hidden, x[ORDER])
    assert found.count == 3
    fields = Fields(x, 2.0)
    assert torch.equal(moved(fields, placement).x, x[ORDER])
    assert (moved(fields, placement).scale, fields.x is x) == (2.0, True)


def test_lists_and_arrays_of_rows_are_moved():
    texts = ["a", "b", "c", "d"]
    assert moved(texts, Placement((), rows_of_lists=4)) == ["c", "a", "b", "d"]
    assert moved(texts, Placement(())) == texts
    assert moved(np.arange(4), Placement(())).tolist() == ORDER.tolist()


def test_packed_sequences_are_moved():
    x = torch.randn(4, 5, 2)
    lengths = torch.tensor([2, 5, 1, 3])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    placement = Placement(tuple(None for _ in tensors_in(packed)))
    padded, found = pad_packed_sequence(moved(packed, placement), batch_first=True)
    assert found.tolist() == lengths[ORDER].tolist()
    assert torch.equal(padded[0, :1], x[2, :1])


def test_the_state_of_an_lstm_is_no_list_of_two_rows():
    state = (torch.zeros(1, 2, 6), torch.zeros(1, 2, 6))
    assert placements(((torch.zeros(2, 10, 4), state), {}), 2)[0] == Placement((0, 1, 1))
