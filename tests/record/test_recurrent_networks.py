"""Recurrent networks: states carried over, parts and gates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import QuestionError
from recorded_networks import CLASSES, OPTIMIZERS, ROWS, STEPS, TIME, WIDTH, assert_exact, everything, target, train

# Truncated backpropagation through time


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_carried_over_batches(path, kind, optimizer):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": kind(WIDTH, 4, num_layers=2, dropout=0.2), "head": nn.Linear(4, CLASSES)}).double()
    made, state = OPTIMIZERS[optimizer](model.parameters()), None
    with dualform.record(model, made, path, batch_axis={"head": 1}) as recorder:
        for _ in range(STEPS):
            recorder.batch(stream=range(ROWS))
            made.zero_grad()
            output, state = model["body"](torch.randn(TIME, ROWS, WIDTH, dtype=torch.float64), state)
            output = model["head"](output)
            F.cross_entropy(output.flatten(0, 1), torch.arange(TIME * ROWS) % CLASSES).backward()
            made.step()
            state = tuple(one.detach() for one in state) if isinstance(state, tuple) else state.detach()
    assert_exact(dualform.open(path, model))
    keys = dualform.open(path).layer("body.l1").keys.reshape(STEPS, ROWS, TIME, 8)
    assert not keys[0, :, 0, 4:].any()
    assert keys[1, :, 0, 4:].any()  # what the batch before left


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_state_carried_within_a_batch(path, kind):
    """Two calls, one backward pass: what the first does to the second counts."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": kind(WIDTH, 4), "head": nn.Linear(4, CLASSES)}).double()
    made = OPTIMIZERS["adamw"](model.parameters())
    with dualform.record(model, made, path, batch_axis={"head": 1}) as recorder:
        for _ in range(STEPS):
            recorder.batch(stream=range(ROWS))
            made.zero_grad()
            first, state = model["body"](torch.randn(TIME, ROWS, WIDTH, dtype=torch.float64))
            second, _ = model["body"](torch.randn(TIME, ROWS, WIDTH, dtype=torch.float64), state)
            output = model["head"](first + second)
            F.cross_entropy(output.flatten(0, 1), torch.arange(TIME * ROWS) % CLASSES).backward()
            made.step()
    assert_exact(dualform.open(path, model))
    assert dualform.open(path).store.slots("body") == 2 * STEPS * TIME * ROWS


# Parts and gates of recurrent layers


RECURRENT = {"lstm": "body.l1_reverse", "gru": "body.l0", "rnn": "body.l0_reverse", "lstm cells": "cell"}
GATES = {"lstm": "ifgo", "gru": "rzn", "rnn": "h", "lstm cells": "ifgo"}


@pytest.mark.parametrize("network", RECURRENT)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parts_and_gates_add_up(path, network, optimizer):
    run, layer = train(network, optimizer, path, steps=3), RECURRENT[network]
    attention = run.dual.attend(run.inputs)[layer]
    weights = [everything(attention.part(name)) for name in ("input", "recurrent")]
    torch.testing.assert_close(sum(weights), everything(attention), rtol=0, atol=1e-13)
    assert all(part.abs().max() > 1e-3 for part in weights)
    torch.testing.assert_close(everything(attention.part("both")), everything(attention), rtol=0, atol=0)
    totals = attention.part("input").total("label")["total"] + attention.part("recurrent").total("label")["total"]
    assert totals.to_list() == pytest.approx(attention.total("label")["total"].to_list(), abs=1e-12)
    answer = run.dual.contributions(run.inputs, target=target)[layer]
    whole = everything(answer)
    assert whole.abs().max() > 1e-6
    parts, gates = ("input", "recurrent"), GATES[network]
    torch.testing.assert_close(sum(everything(answer.part(name)) for name in parts), whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(sum(everything(answer.gate(name)) for name in gates), whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(everything(answer.part("both")), whole, rtol=0, atol=0)


def test_what_has_no_parts_and_no_gates(path):
    run = train("gru", "sgd", path, steps=2)
    attention, answers = run.dual.attend(run.inputs), run.dual.contributions(run.inputs, target=target)
    for answer in (attention["head"], answers["head"]):
        with pytest.raises(QuestionError, match="recurrent layers have the parts"):
            answer.part("input")
    with pytest.raises(QuestionError, match=r'part\("left"\)|"input", "recurrent" and "both"'):
        attention["body.l0"].part("left")
    with pytest.raises(QuestionError, match="'head' is not recurrent"):
        answers["head"].gate("i")
    with pytest.raises(QuestionError, match=r"the gates of layer 'body\.l0' are 'r', 'z', 'n'"):
        answers["body.l0"].gate("f")
