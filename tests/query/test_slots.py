"""Slot numbers as a person reads them, whatever the sizes of batches."""

import numpy as np
import pytest
import torch
from torch import nn

import dualform
from dualform.query.slots import describe


@pytest.mark.parametrize("sizes", [[4], [4, 4, 4], [4, 4, 1], [4, 4, 7], [2, 5, 3, 3]])
def test_slots_of_batches_of_all_sizes(tmp_path, sizes):
    torch.manual_seed(0)
    model, ids = nn.Linear(3, 2), torch.arange(sum(sizes)).flip(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for some in ids.split(sizes):
            recorder.batch(sample_id=some)
            optimizer.zero_grad()
            model(torch.randn(len(some), 3)).sum().backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run")
    [layer] = dual.layers
    slots = np.random.default_rng(0).permutation(sum(sizes))
    found = describe(dual.store, layer, slots, len(sizes))
    assert found["slot"].to_list() == found["row"].to_list() == slots.tolist()
    assert found["step"].to_list() == np.repeat(np.arange(len(sizes)), sizes)[slots].tolist()
    assert found["sample_id"].to_list() == ids[torch.from_numpy(slots)].tolist()
    assert found["slot_position"].to_list() == [0] * len(slots)
