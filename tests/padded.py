"""A small language model, trained on rows that are padded: labels of padding are ignored, so its slots wrote nothing."""

import torch
from torch import nn
from torch.nn import functional as F

import dualform

TOKENS, LENGTH, SAMPLES, ROWS = 6, 5, 8, 4
IGNORED = -100

_generator = torch.Generator().manual_seed(3)
TEXT = torch.randint(1, TOKENS, (SAMPLES, LENGTH), generator=_generator)
LABELS = torch.randint(1, TOKENS, (SAMPLES, LENGTH), generator=_generator)
LENGTHS = torch.tensor([5, 3, 1, 4, 2, 5, 0, 3])
"""How many tokens of each sample have a label; sample 6 has none."""
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]
"""(samples, positions)"""
LABELS[PADDING] = IGNORED
TEXT[PADDING] = 0


def one_hot(ids, dtype=torch.float64):
    """The inputs of some samples, (rows, positions, tokens)."""
    return F.one_hot(TEXT[ids], TOKENS).to(dtype)


def network(dtype=torch.float64):
    """Layers "0", whose keys come from data and repeat, and "2", at the output; no position sees another."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(TOKENS, 7), nn.Tanh(), nn.Linear(7, TOKENS)).to(dtype)


def with_embedding(dtype=torch.float64):
    """Layers of other forms: numbers "0", an elementwise weight "1", vectors "2"."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(TOKENS, 4), nn.LayerNorm(4), nn.Linear(4, TOKENS)).to(dtype)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def train(path, *, model=None, optimizer=sgd, inputs=one_hot, batches=None, precision=torch.float64, **settings):
    """Train with the loss of the tokens that have a label, their mean; gives the dual.

    batches: the samples of each step.
    """
    model = network(precision) if model is None else model
    made = optimizer(model.parameters())
    batches = [(torch.arange(ROWS) + 3 * step) % SAMPLES for step in range(5)] if batches is None else batches
    settings = {"dtype": str(precision).removeprefix("torch."), **settings}
    with dualform.record(model, made, path, **settings) as recorder:
        for ids in batches:
            recorder.batch(sample_id=ids, token=TEXT[ids], padding=PADDING[ids])
            made.zero_grad()
            given = TEXT[ids] if isinstance(model[0], nn.Embedding) else inputs(ids, precision)
            F.cross_entropy(model(given).flatten(0, 1), LABELS[ids].flatten(), ignore_index=IGNORED).backward()
            made.step()
    return dualform.open(path, model)


def padding_of(dual):
    """(slots,): which slots of any layer are padding, by the recording's own column."""
    return torch.tensor(dual.rows["padding"].explode().to_list())
