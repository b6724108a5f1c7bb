"""A network so small that it is trained again in milliseconds. A module of its own: other processes import it."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.evaluate.study import Margin, Study

SAMPLES, TESTS, FEATURES, CLASSES = 40, 20, 6, 3
CALLS = []
"""The sizes of the subsets trained on in this process."""


def data():
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(SAMPLES + TESTS) % CLASSES
    inputs = torch.randn(SAMPLES + TESTS, FEATURES, generator=generator) + 1.5 * F.one_hot(labels, FEATURES)
    return inputs, labels


def network():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def train(ids, seed, folder=None):
    CALLS.append(len(ids))
    inputs, labels = data()
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    recorder = None if folder is None else dualform.record(model, optimizer, folder)
    for _ in range(10):
        for some in ids[torch.randperm(len(ids))].split(10):
            if recorder is not None:
                recorder.batch(sample_id=some, label=labels[some])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[some]), labels[some]).backward()
            optimizer.step()
    if recorder is not None:
        recorder.close()
    return model


def samples(ids):
    inputs, labels = data()
    return inputs[ids], labels[ids]


def study(**changes):
    inputs, labels = data()
    given = {"model": network(), "train": train, "inputs": inputs[SAMPLES:], "target": Margin(labels[SAMPLES:])}
    return Study(**given | {"samples": samples} | changes)


@dataclass(frozen=True)
class Faster:
    """The same training, with a setting."""

    lr: float

    def __call__(self, ids, seed):
        return train(ids, seed)
