"""A tiny text, and a language model that is trained on it in a moment."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import dualform
from dualform.language.description import COLUMN, Description, write_description
from dualform.language.model import build_model
from dualform.language.shape import LAYER, Shape

STORY = (
    "“Don’t,” said the Crow — 🧀 naïve\nThe fox saw the crow and the cheese.\nA lamb drank at a little distance.\n"
    "The wolf stood high up the stream.\nThe crow let the cheese fall.\n"
)
EMBEDDING = 6
STATE = 8
ROWS = 4
WINDOW = 10
STEPS = 18


def train_language_model(text, folder, *, keep="totals", steps=STEPS, between=0):
    """Record a training with Adam. keep: "totals" per position, or all "slots" in float16."""
    shape = Shape(len(text.vocabulary), EMBEDDING, STATE, between=between)
    model = build_model(shape, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    options = {"dtype": "float16"} if keep == "slots" else {"keep": "totals", "totals": {COLUMN: "keys"}}
    ids = text.train.ids
    begins = np.arange(ROWS) * len(ids) // ROWS
    with dualform.record(model, optimizer, folder, layers=[LAYER], **options) as recorder:
        write_description(folder, Description(text, shape))
        for step in range(steps):
            places = (begins[:, None] + step * WINDOW + np.arange(WINDOW + 1)) % len(ids)
            tokens = torch.from_numpy(ids[places].astype(np.int64))
            recorder.batch(**{COLUMN: torch.from_numpy(places[:, :-1].copy())})
            optimizer.zero_grad()
            logits, _ = model(tokens[:, :-1])
            cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
