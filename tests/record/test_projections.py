"""Many parameters seen through R in one compiled loop, compared with each by itself."""

import numpy as np
import pytest
import torch
from torch import nn

from dualform.native.kernels import kernels
from dualform.projection import Looked
from dualform.record.audit import explain
from dualform.record.parameters import PARTS, PassShare, RecordedParameter
from dualform.record.projections import Projections

SHAPES = ((100, 300), (7, 33), (1, 5), (40,), (6, 3, 5, 5), (500, 400))


def parameters(dtype: torch.dtype = torch.float32) -> list[RecordedParameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, shape in enumerate(SHAPES):
        value = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        made.append(RecordedParameter(number, f"{number}", value, 5, vector=len(shape) == 1))
    return made


def look_all(made: list[RecordedParameter], tensors: list[torch.Tensor]) -> list[Looked]:
    projections = Projections(made)
    projections.before_update(tensors, [None] * len(made))
    return [projections.seen(place) for place in range(len(made))]


def remembering(made: list[RecordedParameter]) -> Projections:
    projections = Projections(made)
    projections.remember()
    return projections


def like(made: list[RecordedParameter]) -> list[torch.Tensor]:
    return [torch.randn_like(one.tensor).detach() for one in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loop_gives_what_each_parameter_gives(dtype: torch.dtype) -> None:
    made = parameters(dtype)
    tensors = like(made)
    for parameter, tensor, seen in zip(made, tensors, look_all(made, tensors), strict=True):
        alone = parameter.look(tensor)
        assert seen.shape == alone.shape
        size = float(tensor.norm()) if tensor.numel() else 0.0
        assert np.abs(seen - alone).max(initial=0) <= 8 * torch.finfo(dtype).eps * size


def test_tensors_that_are_not_contiguous() -> None:
    made = parameters()
    tensors = like(made)
    turned = [t.T.contiguous().T if t.dim() == 2 else t for t in tensors]
    for one, two in zip(look_all(made, tensors), look_all(made, turned), strict=True):
        assert np.abs(one - two).max(initial=0) <= 1e-3
    assert len(look_all([], [])) == 0


def test_a_weight_without_columns() -> None:
    weight = RecordedParameter(0, "weight", nn.Parameter(torch.empty(5, 0)), 5, vector=False)
    assert look_all([weight], [weight.tensor])[0].tolist() == [0.0] * 5
    assert not weight.changed()


def test_a_sparse_gradient() -> None:
    table = RecordedParameter(0, "table", nn.Parameter(torch.zeros(50, 9)), 5, vector=False)
    gradient = torch.randn(50, 9)
    seen = look_all([table], [gradient.to_sparse()])[0]
    assert np.abs(seen - table.look(gradient)).max() <= 1e-5


@pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
def test_untouched_parameters_are_unchanged() -> None:
    made = parameters()
    projections = remembering(made)
    assert all(projections.unchanged() for _ in range(2 * PARTS))
    made[0].tensor.data.mul_(1)  # counted by nobody, and changes nothing
    assert all(projections.unchanged() for _ in range(2 * PARTS))


@pytest.mark.parametrize("place", [0, 1, 3, 4, 5])
def test_an_uncounted_edit_is_seen_once_its_part_is_compared(place: int) -> None:
    """… and by whom it is told: who asks each parameter must look at the same part."""
    made = parameters()
    projections = remembering(made)
    flat = made[place].tensor.data.view(-1)
    flat[-1] += 10.0
    told = []
    for _ in range(PARTS):
        unchanged = projections.unchanged()
        told.append([] if unchanged else [one.number for one in made if one.changed()])
    assert [one for one in told if one] == [[place]] * (1 if made[place].is_matrix else PARTS)


def test_an_edit_that_pytorch_counts_is_seen_at_once() -> None:
    made = parameters()
    projections = remembering(made)
    with torch.no_grad():
        made[5].tensor[3, 4] += 10
    assert not projections.unchanged()
    assert [one.number for one in made if one.changed()] == [5]


def test_nan_is_left_to_the_parameter_itself() -> None:
    made = parameters()
    with torch.no_grad():
        made[0].tensor[:] = torch.nan
    assert not remembering(made).unchanged()
    assert not any(one.changed() for one in made)


@pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
def test_gradients_and_parameters_before_an_update() -> None:
    made = parameters()
    projections, tensors = remembering(made), like(made)
    shares = [PassShare(None, seen.copy(), 1.0, task=0) for seen in look_all(made, tensors)]
    told = []
    for turn in range(2 * PARTS):
        if turn == PARTS:
            made[0].tensor.data[-1] += 10
        same = projections.before_update(tensors, shares)
        told.append(same)
        assert same or [one.number for one in made if one.changed()] == [0]
    assert told.count(False) == 1
    assert told[:PARTS] == [True] * PARTS
    for place, (parameter, tensor) in enumerate(zip(made, tensors, strict=True)):
        assert projections.seen(place) == pytest.approx(parameter.look(tensor), abs=1e-3)


def test_hand_out_tells_each_parameter_what_was_remembered() -> None:
    made = parameters()
    projections = remembering(made)
    with torch.no_grad():
        made[0].tensor.mul_(2)
    projections.remember()
    projections.hand_out()
    assert not any(one.changed() for one in made)


def test_a_missing_gradient_changes_nothing_for_the_others() -> None:
    made = parameters()
    projections, tensors = remembering(made), like(made)
    shares = [PassShare(None, seen.copy(), 1.0, task=0) for seen in look_all(made, tensors)]
    some = [None if place == 2 else tensor for place, tensor in enumerate(tensors)]
    projections.before_update(some, shares)
    if kernels() is not None:
        found = [projections.verdict(place) for place in range(len(made)) if place != 2]
        assert all(one is not None and one.explained for one in found)


random = np.random.default_rng(0)
G, H = random.standard_normal((2, 20)).astype(np.float32).astype(np.float64)
TINY, INFINITE, NOTHING = np.full(20, 2.0**-60), np.full(20, np.inf), np.zeros(20)


@pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
@pytest.mark.parametrize("roundoff", [2.0**-24, 2.0**-53])
@pytest.mark.parametrize(
    ("added", "scale", "gradient"),
    [
        (G, 20.0, G),
        (G, 20.0, 0.25 * G),
        (G, 20.0, -3 * G),
        (G, 20.0, G + 1e-3 * H),
        (G, 20.0, H),
        (G, 20.0, G * (1 + 2.0**-22)),
        (G, 20.0, 2.0**-40 * G),
        (G, 20.0, NOTHING),
        (NOTHING, 0.0, G),
        (NOTHING, 0.0, NOTHING),
        (TINY, 1.0, 3 * TINY),
        (G, np.inf, NOTHING),
        (G, np.inf, H),
        (G, np.nan, 0.5 * G),
        (G, 20.0, INFINITE),
        (INFINITE, 20.0, G),
        (G * np.nan, 20.0, G),
        (G, 20.0, G * np.nan),
    ],
)
def test_compiled_verdicts_equal_the_plain_ones(added: Looked, scale: float, gradient: Looked, roundoff: float) -> None:
    """For a vector, which is compared as it is, and for a weight, seen through an R of one column.

    Of noise the loop says only that it is noise: the plain way then projections at the other parameters.
    """
    bias = RecordedParameter(0, "bias", nn.Parameter(torch.zeros(20)), 5, vector=True)
    weight = RecordedParameter(1, "weight", nn.Parameter(torch.zeros(20, 1)), 5, vector=False)
    shares = [PassShare(None, added, scale, task=0), PassShare(None, added * float(weight.random[0, 0]), scale, task=0)]
    tensors = [torch.tensor(gradient, dtype=torch.float32), torch.tensor(gradient, dtype=torch.float32)[:, None]]
    bias.roundoff = weight.roundoff = roundoff
    projections = Projections([bias, weight])
    with np.errstate(all="ignore"):
        projections.before_update(tensors, shares)
        for place, share in enumerate(shares):
            verdict = projections.verdict(place)
            assert verdict is not None
            wanted = explain([share], projections.seen(place), roundoff)
            assert verdict.determined == wanted.determined
            if not wanted.determined:
                continue
            assert verdict.explained == wanted.explained
            assert verdict.signal == pytest.approx(wanted.signal, rel=1e-12)
            assert verdict.factors == pytest.approx(wanted.factors, rel=1e-14, nan_ok=True)
            assert verdict.residual == pytest.approx(wanted.residual, rel=1e-7, abs=1e-15, nan_ok=True)
