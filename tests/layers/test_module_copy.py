import copy
import functools
import io
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

from dualform.layers.module_copy import MOST_PARTS, Copier, rebind_forwards


class Busy(nn.Module):
    """Changes everything that a module can change when it runs."""

    def __init__(self):
        super().__init__()
        self.map, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.log, self.last = 0, [], None
        self.by_name = {"map": self.map}
        self.apply_map = self.map.forward

    def forward(self, x):
        self.calls += 1
        self.log.append(len(x))
        self.seen += 1
        self.last = self.norm(self.by_name["map"](x) + self.apply_map(x))
        return self.last


def test_running_the_copy_leaves_the_original_as_it_was():
    module = Busy()
    module(torch.randn(4, 3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    last = module.last
    copied = Copier().copy(module)
    copied(torch.randn(5, 3))
    assert (module.calls, module.log, module.last) == (1, [4], last)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (copied.calls, copied.log) == (2, [4, 5])


def test_the_copy_shares_the_memory_of_weights_and_has_parts_of_its_own():
    module, copier = Busy(), Copier()
    copied = copier.copy(module)
    assert copied.map.weight.data_ptr() == module.map.weight.data_ptr()
    assert copied.map is not module.map
    assert copied.by_name["map"] is copied.map
    assert copied.apply_map.__self__ is copied.map
    assert copier.modules[id(module.map)] is copied.map
    assert copied.seen is not module.seen


def test_what_is_assigned_to_a_parameter_of_the_copy_stays_there():
    """A momentum encoder assigns to .data of its parameters in each forward pass."""
    module = nn.Linear(3, 3)
    before = module.weight.clone()
    copied = Copier().copy(module)
    copied.weight.data = torch.zeros(3, 3)
    copied.weight.grad = torch.ones(3, 3)
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    copied = Copier().copy(model)
    assert copied[0].weight is copied[1].weight


def test_a_tensor_with_a_history_is_no_obstacle():
    """copy.deepcopy refuses what is no leaf, such as an activation that a module keeps."""
    module = Busy()
    module(torch.randn(4, 3))
    assert module.last.grad_fn is not None
    Copier().copy(module)


def test_hooks_are_left_out_except_those_that_compute_weights():
    seen = []
    module = nn.Sequential(spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 2))
    module[1].register_forward_hook(lambda *_: seen.append(1))
    module.eval()
    expected = module(torch.ones(2, 3))
    seen.clear()
    assert torch.equal(Copier().copy(module)(torch.ones(2, 3)), expected)
    assert seen == []


class Cache:
    """A plain object with state, as a key-value cache is."""

    def __init__(self):
        self.keys, self.count = [torch.zeros(2)], 0


class Pair(NamedTuple):
    first: list
    second: int


@pytest.mark.parametrize(
    ("value", "change", "state"),
    [
        (torch.zeros(2), lambda v: v.add_(1), lambda v: v.tolist()),
        (np.zeros(2), lambda v: v.__setitem__(0, 1.0), lambda v: v.tolist()),
        (Cache(), lambda v: (v.keys[0].add_(1), setattr(v, "count", 5)), lambda v: (v.keys[0].tolist(), v.count)),
        ([1], lambda v: v.append(2), list),
        ({1: [2]}, lambda v: v[1].append(2), str),
        (OrderedDict(a=[1]), lambda v: v["a"].append(2), str),
        (defaultdict(list, a=[1]), lambda v: v["b"].append(2), str),
        (Counter("aab"), lambda v: v.update("a"), str),
        (deque([1, 2], maxlen=2), lambda v: v.append(3), str),
        ({1}, lambda v: v.add(2), sorted),
        (bytearray(b"a"), lambda v: v.extend(b"b"), bytes),
        ((1, [2]), lambda v: v[1].append(3), str),
        (Pair([1], 2), lambda v: v.first.append(3), str),
        (random.Random(0), lambda v: v.random(), lambda v: v.getstate()),
        (np.random.default_rng(0), lambda v: v.random(), lambda v: str(v.bit_generator.state)),
        (torch.Generator(), lambda v: torch.rand(1, generator=v), lambda v: v.get_state().tolist()),
        (functools.partial(list.append, [1]), lambda v: v(2), lambda v: v.args),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_copy_changes_is_its_own(value, change, state):
    module = nn.Identity()
    module.state = value
    before = state(value)
    copied = Copier().copy(module).state
    assert state(copied) == before
    assert type(copied) is type(value)
    change(copied)
    assert state(value) == before
    assert state(copied) != before


def test_a_wrapped_forward_runs_the_copy():
    """Wrappers replace model.forward by a function that holds the original one in its closure."""
    module = Busy()
    original = module.forward

    def doubled(x):
        return 2 * original(x)

    module.forward = doubled
    copied = Copier().copy(module)
    copied(torch.randn(4, 3))
    assert (module.calls, copied.calls) == (0, 1)


def test_a_method_that_was_put_in_the_place_of_forward_runs_the_copy():
    module = Busy()
    original = module.forward
    module.forward = types.MethodType(lambda self, x: original(x), module)
    copied = Copier().copy(module)
    copied(torch.randn(4, 3))
    assert (module.calls, copied.calls) == (0, 1)


def test_a_wrapped_forward_of_a_deep_copy_runs_that_copy():
    module = Busy()
    original = module.forward
    module.forward = lambda x: original(x)
    copied = copy.deepcopy(module)
    rebind_forwards(module, copied)
    copied(torch.randn(4, 3))
    assert (module.calls, copied.calls) == (0, 1)


@pytest.mark.parametrize("part", [threading.Thread(), io.BytesIO()], ids=["thread", "file"])
def test_what_runs_or_is_open_is_shared_with_all_that_owns_it(part):
    module = nn.Identity()
    module.trainer = Cache()
    module.trainer.writer = Cache()
    module.trainer.writer.part = part
    assert Copier().copy(module).trainer is module.trainer


def test_a_weak_reference_is_shared():
    module = nn.Identity()
    module.cache = Cache()
    module.cache.network = weakref.proxy(module)
    assert Copier().copy(module).cache.network is module.cache.network


def test_objects_that_refer_to_each_other():
    module = nn.Identity()
    module.cache = Cache()
    module.cache.owner = module
    copied = Copier().copy(module)
    assert copied.cache.owner is copied


def test_an_object_with_too_many_parts_is_shared():
    """A module may refer to its trainer, and so to all data."""
    module = nn.Identity()
    module.trainer = Cache()
    module.trainer.data = [[number] for number in range(MOST_PARTS)]
    assert Copier().copy(module).trainer is module.trainer
