"""Looks at many parameters in one compiled loop against a look at each."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.native.kernels import kernels
from dualform.projection import Looked
from dualform.record.audit import explain
from dualform.record.looks import Looks
from dualform.record.optimizers import OPTIMIZERS
from dualform.record.parameters import PARTS, Link, ParameterLedger

SHAPES = ((100, 300), (7, 33), (1, 5), (40,), (6, 3, 5, 5), (500, 400))


def ledgers(dtype: torch.dtype = torch.float32) -> list[ParameterLedger]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, shape in enumerate(SHAPES):
        value = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        made.append(ParameterLedger(number, f"{number}", value, 5, vector=len(shape) == 1))
    return made


def look_all(made: list[ParameterLedger], tensors: list[torch.Tensor]) -> list[Looked]:
    looks = Looks(made)
    looks.before_update(tensors, [None] * len(made))
    return [looks.seen(place) for place in range(len(made))]


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
    assert [one for one in told if one] == [[place]] * (1 if made[place].is_matrix else PARTS)


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
def test_gradients_and_parameters_are_looked_at_in_one_go() -> None:
    made = ledgers()
    looks, tensors = remembering(made), like(made)
    links = [Link(None, looks_like.copy(), 1.0, task=0) for looks_like in look_all(made, tensors)]
    told = []
    for turn in range(2 * PARTS):
        if turn == PARTS:
            made[0].parameter.data[-1] += 10
        usual, same = looks.before_update(tensors, links)
        told.append(same)
        assert usual  # whatever has become of the parameters
        assert same or [one.number for one in made if one.changed()] == [0]
    assert told.count(False) == 1
    assert told[:PARTS] == [True] * PARTS
    for place, (ledger, tensor) in enumerate(zip(made, tensors, strict=True)):
        assert looks.seen(place) == pytest.approx(ledger.look(tensor), abs=1e-3)


def test_what_was_remembered_is_handed_out_to_who_looks_at_each() -> None:
    made = ledgers()
    looks = remembering(made)
    with torch.no_grad():
        made[0].parameter.mul_(2)
    looks.remember()
    looks.hand_out()
    assert not any(one.changed() for one in made)


def test_a_gradient_that_is_not_there_changes_nothing_for_the_others() -> None:
    made = ledgers()
    looks, tensors = remembering(made), like(made)
    links = [Link(None, looks_like.copy(), 1.0, task=0) for looks_like in look_all(made, tensors)]
    some = [None if place == 2 else tensor for place, tensor in enumerate(tensors)]
    looks.before_update(some, links)
    if kernels() is not None:
        found = [looks.verdict(place) for place in range(len(made)) if place != 2]
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

    Of noise the loop says only that it is noise: the plain way then looks at the other parameters.
    """
    bias = ParameterLedger(0, "bias", nn.Parameter(torch.zeros(20)), 5, vector=True)
    weight = ParameterLedger(1, "weight", nn.Parameter(torch.zeros(20, 1)), 5, vector=False)
    links = [Link(None, added, scale, task=0), Link(None, added * float(weight.random[0, 0]), scale, task=0)]
    tensors = [torch.tensor(gradient, dtype=torch.float32), torch.tensor(gradient, dtype=torch.float32)[:, None]]
    bias.roundoff = weight.roundoff = roundoff
    looks, ordinary = Looks([bias, weight]), True
    with np.errstate(all="ignore"):
        usual, _ = looks.before_update(tensors, links)
        for place, link in enumerate(links):
            verdict = looks.verdict(place)
            assert verdict is not None
            wanted = explain([link], looks.seen(place), roundoff)
            ordinary = ordinary and wanted.explained and wanted.determined and wanted.factors != [0.0]
            assert verdict.determined == wanted.determined
            if not wanted.determined:
                continue
            found = tuple(looks.factors()[place].tolist())
            assert found == pytest.approx((wanted.factors[0], wanted.residual), abs=1e-7, nan_ok=True)
            assert verdict.explained == wanted.explained
            assert verdict.signal == pytest.approx(wanted.signal, rel=1e-12)
            assert verdict.factors == pytest.approx(wanted.factors, rel=1e-14, nan_ok=True)
            assert verdict.residual == pytest.approx(wanted.residual, rel=1e-7, abs=1e-15, nan_ok=True)
        assert usual == ordinary


SETTINGS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9, "foreach": False},
    {"lr": torch.tensor(0.1), "momentum": 0.5, "foreach": True},
]


class Walk:
    """Some parameters that SGD updates with random gradients, looked at as the books do."""

    def __init__(self, size: float = 1.0, **settings: Any) -> None:
        self.made, self.replay = ledgers(), OPTIMIZERS[torch.optim.SGD]
        self.optimizer = torch.optim.SGD([one.parameter for one in self.made], **settings)
        self.looks, self.size = remembering(self.made), size

    def step(self) -> bool:
        """An update; gives whether the parameters were the same before it."""
        gradients = [self.size * gradient for gradient in like(self.made)]
        _, same = self.looks.before_update(gradients, [None] * len(self.made))
        if not same:
            same = not any(one.changed() for one in self.made)
        state, (group,) = self.optimizer.state, self.optimizer.param_groups
        shared, own = self.replay.read(group, [state.get(one.parameter, {}) for one in self.made])
        settings = [{**shared, **one} for one in own]
        for one, gradient in zip(self.made, gradients, strict=True):
            one.parameter.grad = gradient
        self.optimizer.step()
        self.fingerprints = self.looks.remember(settings, [state[one.parameter] for one in self.made])
        return same


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_sgd_will_do_is_known(settings: dict[str, Any]) -> None:
    """After an update nothing is looked at: what is remembered is where the parameters must be, to rounding."""
    walk = Walk(**settings)
    for number in range(5 * PARTS):
        if number == 20:
            walk.optimizer.param_groups[0]["lr"] = 0.03
        assert walk.step()
        walk.looks.hand_out()
        for ledger, told in zip(walk.made, walk.fingerprints, strict=True):
            seen = ledger.look(ledger.parameter)
            off, size = float(np.linalg.norm(ledger.seen - seen)), float(np.linalg.norm(seen))
            assert off <= ledger.slack * size / 8  # far from what would be told as an edit
            assert told == pytest.approx(
                float(ledger.mixed @ seen), abs=off * float(np.linalg.norm(ledger.mixed)) + 1e-12
            )


@pytest.mark.parametrize("place", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("counted", [True, False])
def test_an_edit_is_seen_beside_what_is_known(place: int, counted: bool) -> None:
    walk = Walk(lr=0.1, momentum=0.9)
    assert all(walk.step() for _ in range(PARTS + 3))
    parameter = walk.made[place].parameter
    with torch.no_grad():
        (parameter if counted else parameter.data).mul_(1.01)
    assert not walk.step()


@pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
def test_another_update_than_that_of_sgd_is_seen() -> None:
    """What changes gradients behind the audit, or weights behind the optimizer, within the optimizer's own step."""
    walk = Walk(lr=0.1)
    assert all(walk.step() for _ in range(3))

    def halve(*_: object) -> None:
        assert walk.made[0].parameter.grad is not None
        walk.made[0].parameter.grad.mul_(0.5)

    walk.optimizer.register_step_pre_hook(halve)
    walk.step()
    assert not walk.step()


@pytest.mark.parametrize("size", [1e10, 1e25, 1e38])
def test_a_walk_that_blows_up_is_no_edit(size: float) -> None:
    """… nor is its coming down: what was large has left rounding errors that are large beside what is small."""
    torch.manual_seed(22)  # with which a weight stays finite among others that do not
    walk = Walk(lr=0.1, momentum=0.9)
    assert all(walk.step() for _ in range(PARTS))
    walk.size = size
    assert all(walk.step() for _ in range(3))
    walk.optimizer.param_groups[0]["weight_decay"] = 10 * 0.999  # all but gone in one step
    walk.optimizer.param_groups[0]["momentum"] = 0.0
    walk.size = 1e-3
    assert all(walk.step() for _ in range(2 * PARTS))
