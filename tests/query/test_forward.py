"""A model that is run to see its queries."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn

import dualform


class Slow(nn.Module):
    """Its first call waits until another one has come by, or cannot."""

    inside, passed = Event(), Event()

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3).double()

    def forward(self, x):
        found = self.head(x)
        if not self.training:
            if self.inside.is_set():
                self.passed.set()
            else:
                self.inside.set()
                self.passed.wait(0.3)
        return found


@pytest.mark.parametrize("question", ["attend", "contributions"])
def test_threads_that_share_a_model_see_their_own_queries(tmp_path, question):
    torch.manual_seed(0)
    model, x = Slow(), torch.randn(4, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=torch.arange(4))
        model(x).square().mean().backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    Slow.inside.clear()
    Slow.passed.clear()

    def ask(place):
        if place:
            Slow.inside.wait(5)
        return getattr(dual, question)(x[place : place + 1])["head"].top(4)

    assert dual.model()  # nobody waits for the weights
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(ask, range(2)))
    for place, found in enumerate(together):
        assert found.equals(getattr(dual, question)(x[place : place + 1])["head"].top(4))
