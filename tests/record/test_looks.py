"""Looks at many parameters in one compiled loop against a look at each."""

import numpy as np
import pytest
import torch
from torch import nn

from dualform.native.kernels import kernels
from dualform.record.audit import Looked
from dualform.record.looks import Looks
from dualform.record.parameters import PARTS, ParameterLedger

SHAPES = ((100, 300), (7, 33), (1, 5), (40,), (6, 3, 5, 5), (500, 400))


def ledgers(dtype: torch.dtype = torch.float32) -> list[ParameterLedger]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, shape in enumerate(SHAPES):
        value = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        made.append(ParameterLedger(number, f"{number}", value, 5, vector=len(shape) == 1))
    return made


def look_all(made: list[ParameterLedger], tensors: list[torch.Tensor]) -> list[Looked]:
    return [seen for seen, _ in Looks(made).at(tensors)]


def remembering(made: list[ParameterLedger]) -> Looks:
    looks = Looks(made)
    looks.remember()
    return looks


def like(made: list[ParameterLedger]) -> list[torch.Tensor]:
    return [torch.randn_like(one.parameter).detach() for one in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_see_what_each_sees(dtype: torch.dtype) -> None:
    made = ledgers(dtype)
    tensors = like(made)
    for ledger, tensor, seen in zip(made, tensors, look_all(made, tensors), strict=True):
        alone = ledger.look(tensor)
        assert seen.shape == alone.shape
        size = float(tensor.norm()) if tensor.numel() else 0.0
        assert np.abs(seen - alone).max(initial=0) <= 8 * torch.finfo(dtype).eps * size
        assert not np.shares_memory(seen, tensor.numpy())


def test_what_is_not_in_rows_is_looked_at_one_by_one() -> None:
    made = ledgers()
    tensors = like(made)
    turned = [t.T.contiguous().T if t.dim() == 2 else t for t in tensors]
    for one, two in zip(look_all(made, tensors), look_all(made, turned), strict=True):
        assert np.abs(one - two).max(initial=0) <= 1e-3
    assert len(look_all([], [])) == 0


def test_a_weight_without_columns_is_nothing_to_see() -> None:
    weight = ParameterLedger(0, "weight", nn.Parameter(torch.empty(5, 0)), 5, vector=False)
    assert look_all([weight], [weight.parameter])[0].tolist() == [0.0] * 5
    assert not weight.changed()


def test_a_sparse_gradient_is_looked_at_by_itself() -> None:
    table = ParameterLedger(0, "table", nn.Parameter(torch.zeros(50, 9)), 5, vector=False)
    gradient = torch.randn(50, 9)
    seen = look_all([table], [gradient.to_sparse()])[0]
    assert np.abs(seen - table.look(gradient)).max() <= 1e-5


@pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
def test_what_nobody_touched_is_unchanged() -> None:
    made = ledgers()
    looks = remembering(made)
    assert all(looks.unchanged() for _ in range(2 * PARTS))
    made[0].parameter.data.mul_(1)  # counted by nobody, and changes nothing
    assert all(looks.unchanged() for _ in range(2 * PARTS))


@pytest.mark.parametrize("place", [0, 1, 3, 4, 5])
def test_an_edit_is_seen_in_the_part_that_it_is_in(place: int) -> None:
    """… and by whom it is told: who asks each parameter must look at the same part."""
    made = ledgers()
    looks = remembering(made)
    flat = made[place].parameter.data.view(-1)
    flat[-1] += 10.0
    told = []
    for _ in range(PARTS):
        unchanged = looks.unchanged()
        told.append([] if unchanged else [one.number for one in made if one.changed()])
    assert [one for one in told if one] == [[place]]


def test_a_counted_edit_is_seen_at_once() -> None:
    made = ledgers()
    looks = remembering(made)
    with torch.no_grad():
        made[5].parameter[3, 4] += 10
    assert not looks.unchanged()
    assert [one.number for one in made if one.changed()] == [5]


def test_numbers_that_are_none_are_left_to_who_knows() -> None:
    made = ledgers()
    with torch.no_grad():
        made[0].parameter[:] = torch.nan
    assert not remembering(made).unchanged()
    assert not any(one.changed() for one in made)


@pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
def test_what_is_compared_gives_the_sums_of_what_is_seen() -> None:
    made = ledgers()
    tensors, random = like(made), np.random.default_rng(0)
    known = [None if place == 2 else random.standard_normal(one.rows * one.columns) for place, one in enumerate(made)]
    for (seen, dots), other in zip(Looks(made).at(tensors, known), known, strict=True):
        assert (dots is None) == (other is None)
        if dots is not None and other is not None:
            rest = seen - other
            assert dots == pytest.approx([seen @ seen, seen @ other, other @ other, rest @ rest], rel=1e-12)
