"""A network of the tests, recorded in float64."""

import torch

import dualform
from training import samples, sgd

INPUTS, LABELS = samples()


def record(model, path, optimizer=None, **settings):
    optimizer = sgd(model) if optimizer is None else optimizer
    return dualform.record(model, optimizer, path, **{"dtype": "float64", **settings})


def slot_frame(dual, layer):
    """Every slot with its address and columns, in the order of the slots."""
    query = torch.zeros(1, dual.layer(layer).keys.shape[1], dtype=torch.float64)
    found = dualform.open(dual.store.location).attend({layer: query})[layer].top(10**6)
    return found.sort("slot")
