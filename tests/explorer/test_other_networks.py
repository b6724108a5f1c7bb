"""Networks that do not end with a recorded layer, or begin with words."""

import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.explorer.session import Session
from dualform.explorer.subject import subject


def recorded(folder, model, inputs, labels, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, folder, **settings) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(len(inputs)), label=labels)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return Session(subject(dualform.open(folder, model), inputs, (inputs, labels)))


def test_the_last_recorded_layer_need_not_make_the_output(tmp_path):
    torch.manual_seed(0)
    inputs, labels = torch.randn(8, 3), torch.arange(8) % 2
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    session = recorded(tmp_path / "part", model, inputs, labels, layers=["0"])
    assert not session.is_last("0")
    assert session.reading.sample(["0"], "0", k=2).units == []
    assert recorded(tmp_path / "whole", model, inputs, labels).is_last("2")


def test_who_reads_from_a_word(tmp_path):
    torch.manual_seed(0)
    words, labels = torch.tensor([[0, 1], [2, 2], [3, 1], [2, 0]]), torch.arange(4) % 2
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    session = recorded(tmp_path / "run", model, words, labels)
    readers = session.reading.sample(["1"], "0", k=4).readers
    # The example is the word 2 twice, at each of three visits: who has it once gets half of who has it twice
    assert {reader.example.input: reader.weight for reader in readers[:2]} == {"test:1": 12.0, "test:3": 6.0}
    assert [reader.weight for reader in readers[2:]] == [0.0, 0.0]
