"""Some output units of a huge layer."""

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import NotRecordedError, RecordingError
from recorded_networks import (
    CLASSES,
    OPTIMIZERS,
    STEPS,
    Cnn,
    Gpt,
    Norms,
    assert_close,
    assert_exact,
    everything,
    parameters,
    tokens,
    train,
)


class Decoding(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.tokens, self.body = nn.Embedding(CLASSES, 4), nn.Linear(4, 6)
        self.decoder = nn.Linear(6, 20, bias=bias)

    def forward(self, tokens):
        return self.decoder(self.body(self.tokens(tokens)).tanh().mean(1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bias", [False, True])
def test_some_outputs_of_a_huge_layer(path, optimizer, bias):
    run = train((lambda: Decoding(bias), tokens), optimizer, path, outputs={"decoder": [3, 1, 3]})
    plain = train((lambda: Decoding(bias), tokens), optimizer, path.with_name("plain"))
    dual, all_of_it = run.dual, plain.dual
    assert_exact(dual)
    reasons = dict(dual.verify().frame.select("parameter", "reason").iter_rows())
    assert reasons["decoder.weight"].endswith("(2 of 20 rows: outputs=)")
    assert dual.store.layer("decoder")[1].outputs == (1, 3)
    assert next(dual.store.chunks("decoder")).errors(torch.float64).shape[1] == 2
    one, other = (d.attend(run.inputs)["decoder"].top(5) for d in (dual, all_of_it))
    assert one.equals(other)
    for unit in (1, 3):
        answers = [d.contributions(run.inputs, target=unit)["decoder"] for d in (dual, all_of_it)]
        torch.testing.assert_close(*map(everything, answers), rtol=0, atol=1e-13)
        parts = answers[0].parts()
        assert parts["remainder"].abs().max() <= 1e-12
        expected = run.model.eval()(run.inputs)[:, unit].tolist()
        assert parts["target"].to_list() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(
        *(everything(d.contributions(run.inputs, target=7)["body"]) for d in (dual, all_of_it)), rtol=0, atol=1e-13
    )
    assert_close(dict(dual.at(STEPS).model().state_dict()), run.checkpoints[-1], atol=0)
    found, expected = (d.masked(drop="label = 1", layers=["tokens", "body"]) for d in (dual, all_of_it))
    assert_close(parameters(found), parameters(expected))


def test_what_some_outputs_cannot_answer(path):
    run = train((Decoding, tokens), "adamw", path, outputs={"decoder": [1, 3]})
    with pytest.raises(
        NotRecordedError, match=r"output 2 of layer 'decoder', whose error signals were not kept.*2 of 20"
    ):
        run.dual.contributions(run.inputs, target=2)["decoder"].top(1)
    with pytest.raises(NotRecordedError, match=r"masked\(\) needs all error signals of 'decoder.weight'.*outputs="):
        run.dual.masked(drop="label = 1")
    with pytest.raises(NotRecordedError, match=r"network after step 2 needs.*a step that has a snapshot: \[0, 6\]"):
        run.dual.at(2).model()


@pytest.mark.parametrize(
    ("network", "outputs", "words"),
    [
        (Decoding, {"decoder": [20]}, r"outputs=\{'decoder': …\}: expected some units from 0 to 19"),
        (Decoding, {"decoder": []}, "expected some units from 0 to 19"),
        (Decoding, {"coder": [1]}, r"outputs names 'coder', which is not recorded\. Recorded layers: .*'decoder'"),
        (Decoding, {"tokens": [1]}, "only for layers like nn.Linear"),
        (Cnn, {"second": [1]}, "only for layers like nn.Linear"),
        (Gpt, {"head": [1]}, "its weight is shared with 'tokens', which needs all of it"),
        (Norms, {"matrix": [1]}, "only for layers like nn.Linear"),
    ],
)
def test_outputs_that_cannot_be_chosen(path, network, outputs, words):
    model = network()
    with pytest.raises(RecordingError, match=words):
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), path, outputs=outputs)


def test_some_outputs_and_deltas_of_groups_do_not_go_together(path):
    model = Decoding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordingError, match='totals= can only be of "keys"'):
        dualform.record(model, optimizer, path, outputs={"decoder": [1]}, totals=["label"])
