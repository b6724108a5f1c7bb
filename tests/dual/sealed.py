"""A small network of many kinds of layers, trained with snapshots on the way."""

import torch
import torch.nn.functional as F
from torch import nn

import dualform

SAMPLES, ROWS, TIME, TOKENS = 10, 4, 3, 5
STEPS, EVERY = 11, 3
TEXT = torch.randint(0, TOKENS, (SAMPLES, TIME + 1), generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(SAMPLES) % 3
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.9, 0.9), maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.8, weight_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1),
}


OTHER_SGD = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, maximize=True),
}


class Network(nn.Module):
    """A tied weight, biases, an elementwise weight, a convolution, and a map that is used in every other step."""

    def __init__(self):
        super().__init__()
        self.tokens, self.body = nn.Embedding(TOKENS, 4), nn.Linear(4, 4)
        self.norm, self.mix = nn.LayerNorm(4), nn.Conv1d(4, 4, 3, padding=1)
        self.extra, self.head = nn.Linear(4, 4), nn.Linear(4, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, extra=False):
        x = self.norm(self.body(self.tokens(x)).tanh())
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.extra(x) if extra else x)


def train(path, optimizer="adamw", *, every=EVERY, precision=torch.float64, dtype="float64", **settings):
    torch.manual_seed(0)
    model = Network().to(precision)
    made = (OPTIMIZERS | OTHER_SGD)[optimizer](model.parameters())
    with dualform.record(model, made, path, dtype=dtype, **settings) as recorder:
        for step in range(STEPS):
            made.param_groups[0]["lr"] *= 0.95
            ids = (torch.arange(ROWS) * 3 + step) % SAMPLES
            recorder.batch(label=LABELS[ids], token=TEXT[ids, :-1])
            made.zero_grad()
            F.cross_entropy(model(TEXT[ids, :-1], step % 2 == 0).flatten(0, 1), TEXT[ids, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            made.step()
            if every and step % every == every - 1:
                recorder.seal()
    return dualform.open(path, model)
