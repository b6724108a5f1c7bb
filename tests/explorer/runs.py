"""Small runs to be explored."""

import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform import demo
from dualform.explorer.forms import Excerpt
from dualform.explorer.session import Session
from dualform.explorer.subject import subject
from dualform.explorer.text import Language

SETTINGS = demo.Settings(epochs=2, train_images=200, width=12, batch=25)
HOSTILE = '</script><script>window.owned=1</script><img src=x onerror="window.owned=1">\'"&{{7*7}}'
"""What no page may believe."""
TEXT = "the wolf and the lamb. the fox and the grapes. the dog and the shadow. "
LETTERS = sorted(set(TEXT))


def digits(folder):
    """A demo that takes a second."""
    with torch.random.fork_rng():
        demo.train(folder, demo.load(SETTINGS), SETTINGS)
    return folder


def hostile(folder):
    """Three features, two tasks, labels and texts from somebody who means harm; gives the dual and what explore() takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    inputs, labels = torch.randn(12, 3), torch.arange(12) % 2
    names = [HOSTILE, "plain"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, folder) as recorder:
        for step in range(6):
            ids = torch.arange(4) + 4 * (step % 3)
            recorder.batch(
                sample_id=ids, label=[names[label] for label in labels[ids].tolist()], task=f"{HOSTILE}{step % 2}"
            )
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()
            recorder.log(**{"loss <b>": 1.0})
    options = {"class_names": names, "show": lambda x: f"{HOSTILE} {x.tolist()}", "title": HOSTILE}
    return dualform.open(folder, model), (inputs, labels), (inputs, labels), options


def lines(folder, **settings):
    """Three features, one layer: the session of a run that keeps what it is told to keep."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(8, 3), torch.arange(8) % 2
    with dualform.record(model, optimizer, folder, **settings) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(8), label=labels)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return Session(subject(dualform.open(folder, model), inputs, (inputs, labels)))


class Letters(nn.Module):
    """A language model of letters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.decoder = nn.Linear(8, len(LETTERS))

    def forward(self, tokens):
        return self.decoder(self.lstm(self.embedding(tokens))[0])


def letters(folder, **settings):
    """A tiny text run: the dual and its language."""
    torch.manual_seed(0)
    model = Letters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    with dualform.record(model, optimizer, folder, **settings) as recorder:
        for step in range(8):
            begin = (torch.arange(3) * 20 + step * 5) % (len(ids) - 11)
            places = begin[:, None] + torch.arange(10)
            recorder.batch(place=places)
            optimizer.zero_grad()
            F.cross_entropy(model(ids[places]).flatten(0, 1), ids[places + 1].flatten()).backward()
            optimizer.step()
            recorder.log(loss=1.0)

    def passage(position):
        before, after = TEXT[max(0, position - 20) : position], TEXT[position + 1 : position + 20]
        return Excerpt(before=before, token=TEXT[position], after=after, title=HOSTILE, position=position)

    def encode(prompt):
        unknown = sorted(set(prompt) - set(LETTERS))
        if unknown or not prompt:
            raise dualform.errors.QuestionError(f"unknown letters: {unknown}" if unknown else "the prompt is empty.")
        return torch.tensor([LETTERS.index(letter) for letter in prompt])

    language = Language(
        encode=encode,
        decode=lambda tokens: "".join(LETTERS[token] for token in tokens),
        passage=passage,
        position="place",
        prompt="the wolf and",
    )
    return dualform.open(folder, model), language
