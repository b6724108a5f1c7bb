"""200 random models whose layers see the rows of a batch in random layouts: no slot may carry another sample's name.

Every vector says whose it is: its first feature is a hundredth of the sample's number.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import AxisError
from dualform.layers.rows import readings

FEATURES = 4

LAYOUTS = {
    "sequence first": lambda x: x.transpose(0, 1),
    "flattened": lambda x: x.flatten(0, 1),
    "sequence first, copied": lambda x: x.transpose(0, 1).contiguous(),
    "one more axis in front": lambda x: x.unsqueeze(0),
    "one more axis": lambda x: x.unsqueeze(1),
    "twice, one batch after the other": lambda x: torch.cat([x, x]),
    "each row twice": lambda x: x.repeat_interleave(2, 0),
    "windows": lambda x: x.unflatten(1, (2, -1)) if x.shape[1] % 2 == 0 else x,
    "overlapping windows": lambda x: x.unfold(1, 2, 1).movedim(-1, 2) if x.shape[1] > 1 else x,
    "positions in another order": lambda x: x.flip(1),
    "second position": lambda x: x[:, -1:],
    "mean over positions": lambda x: x.mean(1, keepdim=True),
    "middle axes swapped": lambda x: x.transpose(1, 2) if x.dim() > 3 else x,
}
"""Steps that keep whole vectors of one row together. Those that need two leading axes are left out where there is one."""

DISORDER = {
    "rows rolled": lambda x: x.roll(1, 0),
    "rows shuffled": lambda x: x[torch.randperm(len(x))],
    "vectors sorted": lambda x: x.flatten(0, -2)[x.flatten(0, -2)[:, 1:].sum(1).argsort()],
    "one row twice, another not at all": lambda x: torch.cat([x[:1], x[:-1]]),
    "two rows swapped": lambda x: torch.cat([x[1:2], x[:1], x[2:]]),
}
"""Steps after which the place of a vector no longer says whose it is."""


@dataclass
class Seen:
    """Whose vectors a layer got: the first features of its input, shaped like its leading axes."""

    samples: torch.Tensor


class Arranged(nn.Module):
    """Linear maps that see an input in layouts of their own, each fed by the one before."""

    def __init__(self, choose):
        super().__init__()
        self.steps = [_choose_steps(choose) for _ in range(3)]
        self.maps = nn.ModuleList([nn.Linear(FEATURES, FEATURES - 1) for _ in self.steps])
        self.places = nn.Embedding(64, FEATURES) if choose.random() < 0.5 else None
        self.dropout = nn.Dropout(0.3 if choose.random() < 0.5 else 0.0)
        self.disorder_in_training_only = choose.random() < 0.3
        self.seen = [None] * len(self.maps)

    def forward(self, x):
        loss = torch.zeros((), dtype=x.dtype)
        tag = x[..., :1]
        for number, (steps, layer) in enumerate(zip(self.steps, self.maps, strict=True)):
            given = x
            for name in steps:
                given = self.arrange(name, given)
            self.seen[number] = Seen(sample_in(given))
            loss = loss + layer(given).square().sum()
            # The next layer gets what this one makes of each vector, with its tag
            hidden = self.dropout(layer(x).tanh())
            if self.places is not None:
                hidden = hidden + self.places(torch.arange(x.shape[1]))[..., 1:]
            x = torch.cat([tag, hidden], -1)
        return loss

    def arrange(self, name, x):
        if name in LAYOUTS:
            return LAYOUTS[name](x) if x.dim() > 2 else x
        if self.disorder_in_training_only and not self.training:
            return x
        return DISORDER[name](x)


def sample_in(vectors):
    """The number of the sample that each vector belongs to."""
    return (100 * vectors[..., 0].detach()).round().long()


def _choose_steps(choose):
    steps = choose.choices(sorted(LAYOUTS), k=choose.randint(0, 3))
    if choose.random() < 0.15:
        steps.insert(choose.randint(0, len(steps)), choose.choice(sorted(DISORDER)))
    return steps


def can_be_read(seen, rows):
    """Whether some reading of the input has exactly the vectors of row r in place r."""
    lead = tuple(seen.samples.shape)
    for where in readings(lead, rows):
        layout = where.layout(lead, rows)
        if layout is None or layout.is_shared:
            continue
        by_row = layout.slots(seen.samples.unsqueeze(-1)).reshape(rows, -1)
        first = seen.samples.min()
        if (by_row == first + torch.arange(rows).unsqueeze(1)).all():
            return True
    return False


def batch_of(choose, first_sample):
    """Rows tagged with consecutive numbers; often as many positions as rows, or a multiple."""
    rows = choose.randint(2, 6)
    positions = choose.choice([rows, rows, 2 * rows, 2, 3, 4])
    inputs = torch.randn(rows, positions, FEATURES, dtype=torch.float64)
    inputs[..., 0] = torch.arange(first_sample, first_sample + rows).unsqueeze(1) / 100
    return inputs


@pytest.mark.parametrize("seed", range(200))
def test_no_slot_carries_another_samples_name(tmp_path, seed):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    model = Arranged(choose).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    asks = choose.random() < 0.5
    readable = [not set(steps) & set(DISORDER) for steps in model.steps]
    try:
        with dualform.record(
            model, optimizer, tmp_path / "run", on_unclear_rows="ask" if asks else "leave out"
        ) as recorder:
            for first_sample in (100, 200):
                inputs = batch_of(choose, first_sample)
                rows = len(inputs)
                recorder.batch(sample_id=torch.arange(rows) + first_sample)
                optimizer.zero_grad()
                model(inputs).backward()
                for number, seen in enumerate(model.seen):
                    readable[number] = readable[number] and can_be_read(seen, rows)
                optimizer.step()
    except AxisError:
        assert asks
        assert not all(readable), f"{model.steps}: the rows could have been found"
        return
    dual = dualform.open(tmp_path / "run")
    ids = dual.rows["sample_id"].to_list()
    for number, steps in enumerate(model.steps):
        slots = dual.slots(f"maps.{number}")["row"].to_list()
        named = [None if row is None else ids[row] for row in slots]
        true = sample_in(dual.layer(f"maps.{number}").keys).tolist()
        for given, right in zip(named, true, strict=True):
            assert given in (None, right), f"{steps}: {named} should be {true}"
        if readable[number]:
            assert None not in named, f"{steps}: the rows could have been found"
    if model.places is not None:
        assert set(dual.slots("places")["row"].to_list()) == {None}
    assert dual.verify().passed
