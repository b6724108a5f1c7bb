import torch
from torch import nn
from torch.nn.utils import spectral_norm

from dualform.layers.module_copy import runnable_copy


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
    copy = runnable_copy(module, {})
    copy(torch.randn(5, 3))
    assert (module.calls, module.log, module.last) == (1, [4], last)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (copy.calls, copy.log) == (2, [4, 5])


def test_the_copy_shares_weights_and_has_parts_of_its_own():
    module, copies = Busy(), {}
    copy = runnable_copy(module, copies)
    assert copy.map.weight is module.map.weight
    assert copy.map is not module.map
    assert copy.by_name["map"] is copy.map
    assert copy.apply_map.__self__ is copy.map
    assert copies[id(module.map)] is copy.map
    assert copy.seen is not module.seen


def test_a_tensor_with_a_history_is_no_obstacle():
    """copy.deepcopy refuses what is no leaf, such as an activation that a module keeps."""
    module = Busy()
    module(torch.randn(4, 3))
    assert module.last.grad_fn is not None
    runnable_copy(module, {})


def test_hooks_are_left_out_but_for_those_that_compute_weights():
    seen = []
    module = nn.Sequential(spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 2))
    module[1].register_forward_hook(lambda *_: seen.append(1))
    module.eval()
    expected = module(torch.ones(2, 3))
    seen.clear()
    assert torch.equal(runnable_copy(module, {})(torch.ones(2, 3)), expected)
    assert seen == []
