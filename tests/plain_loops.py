"""Small networks and data for training loops in the precision that a test asks for."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

import dualform

GAPS = {torch.float64: 1e-12, torch.float32: 2e-5}


def network(*widths, dtype=None):
    torch.manual_seed(0)
    layers = []
    for d_in, d_out in itertools.pairwise(widths):
        layers += [nn.Linear(d_in, d_out, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def sgd(*modules, lr=0.1, momentum=0.9, **settings):
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, **settings)


def batches(count, rows=6, width=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        x = torch.randn(rows, width, generator=generator)
        yield (
            torch.arange(rows) + number * rows,
            x,
            torch.randn(rows, 2, generator=generator),
        )


def assert_exact(path, model=None, gap=None):
    certificate = dualform.open(path, model).verify()
    assert certificate.passed, str(certificate)
    assert certificate.frame["gap"].max() <= max(gap or 0, GAPS[torch.get_default_dtype()]), str(certificate)
    return certificate


def train(model, optimizer, recorder, stream):
    for ids, x, y in stream:
        recorder.batch(sample_id=ids)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
