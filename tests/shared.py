"""A small network with position embeddings that serve all rows at once: their slots have no row."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import dualform

TOKENS, LENGTH, WIDTH, CLASSES, SAMPLES, ROWS, STEPS = 6, 4, 5, 3, 8, 3, 5
SHARED = "places"
"""The layer whose slots have no row."""

_generator = torch.Generator().manual_seed(4)
TEXT = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=_generator)
LABELS = torch.arange(SAMPLES) % CLASSES
BATCHES = [(torch.arange(ROWS) * 2 + 3 * step) % SAMPLES for step in range(STEPS)]


class Network(nn.Module):
    """Words and places, a map that every position goes through, and a head for each row."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, *, by_row=False):
        """by_row: the ids of places are given for each row."""
        ids = torch.arange(LENGTH)[None]
        x = self.words(tokens) + self.places(ids.expand(len(tokens), -1) if by_row else ids)
        return self.head(self.body(x).tanh().mean(1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=0.01)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().double()


def train(path, *, optimizer=sgd, checkpoints=None, now_and_then=False, **settings):
    """Train and record; gives the dual. checkpoints: a list that gets the weights after 0, 1, … steps.

    now_and_then: in every other step, the layer that serves all rows has an input for each of them.
    """
    model = network()
    checkpoints = [] if checkpoints is None else checkpoints
    checkpoints.append(copy.deepcopy(model.state_dict()))
    made = optimizer(model.parameters())
    with dualform.record(model, made, path, dtype="float64", **settings) as recorder:
        for step, ids in enumerate(BATCHES):
            recorder.batch(sample_id=ids, label=LABELS[ids], task="early" if step < 2 else "late", token=TEXT[ids])
            made.zero_grad()
            output = model(TEXT[ids], by_row=now_and_then and step % 2 == 1)
            F.cross_entropy(output, LABELS[ids]).backward()
            made.step()
            checkpoints.append(copy.deepcopy(model.state_dict()))
            if step == 2:
                recorder.seal()
    return dualform.open(path, model)
