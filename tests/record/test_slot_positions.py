"""Slots of networks with positions have the name and the position of their sample."""

import copy
import gc
import weakref

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dualform
from recorded_networks import CLASSES, TIME, WIDTH, assert_exact, train


class Marked(nn.Module):
    """A body over (rows, time, features), whichever axis it wants first."""

    def __init__(self, body, call):
        super().__init__()
        self.body, self.call, self.head = body, call, nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.call(self.body, x).mean(1))


def time_first(body, x):
    return body(x.transpose(0, 1))[0].transpose(0, 1)


def packed(body, x):
    lengths = torch.tensor([TIME - 2, TIME, TIME - 1, TIME])[: len(x)]
    output, _ = body(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(output, batch_first=True, total_length=TIME)[0]


def in_a_loop(body, x):
    state, outputs = None, []
    for time in range(x.shape[1]):
        state = body(x[:, time], state)
        outputs.append(state)
    return torch.stack(outputs, 1)


def attend(body, x):
    x = x if body.batch_first else x.transpose(0, 1)
    output = body(x, x, x)[0]
    return output if body.batch_first else output.transpose(0, 1)


BODIES = {
    "lstm, batch first": ("body", nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda body, x: body(x)[0]),
    "lstm, time first": ("body", nn.LSTM(WIDTH, WIDTH), time_first),
    "gru, packed": ("body", nn.GRU(WIDTH, WIDTH), packed),
    "cells": ("body", nn.RNNCell(WIDTH, WIDTH), in_a_loop),
    "attention, batch first": ("body.k", nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend),
    "attention, time first": ("body.q", nn.MultiheadAttention(WIDTH, 2), attend),
    "convolution": ("body", nn.Conv1d(WIDTH, WIDTH, 1), lambda body, x: body(x.transpose(1, 2)).transpose(1, 2)),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_slot_has_the_name_and_the_position_of_its_sample(path, body):
    """Keys of length one: the key most like a query is itself. There are as many rows as times, to be mistaken for each other."""
    layer, module, call = BODIES[body]
    torch.manual_seed(0)
    model = Marked(copy.deepcopy(module), call).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = F.normalize(torch.randn(12, TIME, WIDTH, dtype=torch.float64), dim=2)
    assert TIME == 4
    with dualform.record(model, optimizer, path) as recorder:
        for ids in torch.randperm(12).split(TIME):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids]), ids % CLASSES).backward()
            optimizer.step()
    dual = dualform.open(path, model)
    assert_exact(dual)
    attention = dual.attend(x[:TIME])[layer]
    attention = attention.part("input") if attention.layer.kind == "recurrent" else attention
    top = attention.top(1).filter(pl.col("weight") > 1 - 1e-12)
    assert top.height >= (9 if body == "gru, packed" else TIME * TIME)  # what is beyond a sequence's end has no key
    assert top["sample_id"].to_list() == top["query"].to_list()
    positions = top["call"] if body == "cells" else top["slot_position"]
    assert positions.to_list() == top["position"].to_list()


@pytest.mark.parametrize("network", ["cnn", "lstm", "packed gru", "gru cells", "encoder", "gpt", "norms"])
def test_earlier_steps_leave_no_graph_behind(path, network):
    """A hook that holds the tensor it hangs on would keep every activation until Python's collector comes by."""
    alive = []

    def watch(module, arguments, output):
        outputs = output if isinstance(output, tuple) else (output,)
        alive.extend(weakref.ref(t) for t in outputs if isinstance(t, torch.Tensor))

    handle = nn.modules.module.register_module_forward_hook(watch)
    gc.collect()
    gc.disable()
    try:
        train(network, "sgd", path, steps=3)
        earlier = alive[: len(alive) * 2 // 3]  # of the first two steps of three
        assert len(earlier) > 3
        assert not [ref() for ref in earlier if ref() is not None]
    finally:
        gc.enable()
        handle.remove()
