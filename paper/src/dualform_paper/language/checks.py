"""A short training with all slots: what totals cannot show. Certificate, sums of sizes, single slots, a logit's split."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dualform
from dualform.language.description import COLUMN, Description, write_description
from dualform.language.recorded import RecordedLanguageModel
from dualform.language.shape import LAYER
from dualform.language.text import Passage, Text
from dualform.progress import Progress, ignore_progress
from dualform_paper.language.settings import Settings
from dualform_paper.language.training import adam, batch_of, initial_model, start, train_step

OUTPUT = "decoder"
PROMPTS = {
    # The queries of Tables 3 and 5, and the token that comes next in the test text
    "aesop": ("The Wolf stood high up the stream and the Lamb a little d", "i"),
    "wikitext-2": ("who was by this time famous , particularly for his contribution", "to"),
}
STEPS, ROWS, TOP, WIDTH = 30, 16, 3, 40


@dataclass(frozen=True)
class Pushed:
    """A training position that pushes a logit."""

    contribution: float
    visits: int
    passage: Passage


@dataclass(frozen=True)
class Checked:
    """What the short training showed."""

    settings: dict[str, Any]
    nbytes: int
    slots: int
    certificate: list[dict[str, Any]]
    passed: bool
    totals_gap: float
    """The largest difference between key sums · query and the sum over slots, relative to the largest."""
    same_top: int
    """How many of the TOP·10 positions with the largest sums are the same for sums of sizes."""
    negative: float
    """The share of slots with a negative attention weight."""
    prompt: str
    target: str
    parts: dict[str, float]
    """The target's logit in the output layer: initial part + slots + remainder."""
    by_position: float
    """The sum over all positions of what their slots add to it."""
    up: list[Pushed]
    down: list[Pushed]


def check(text: Text, settings: Settings, folder: Path, progress: Progress = ignore_progress) -> Checked:
    """Train some steps with every slot of the LSTM, and of the output layer for some tokens, in float32."""
    settings = replace(settings, steps=min(STEPS, settings.steps), batch=min(ROWS, settings.batch), predicted=1.0)
    prompt, target = PROMPTS.get(text.name) or _end(text)
    unit = text.numbers[target]
    model = initial_model(settings, len(text.vocabulary))
    optimizer = adam(model, settings)
    state = start(model, settings.batch)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with dualform.record(
        model, optimizer, folder, layers=[LAYER, OUTPUT], outputs={OUTPUT: [unit]}, overwrite=True
    ) as recorder:
        write_description(folder, Description(text, model.shape))
        for step in range(settings.steps):
            read = batch_of(text.train.ids, step, settings)
            recorder.batch(**{COLUMN: read.positions})
            _, state = train_step(model, optimizer, read, state, step, settings, whole=True)
            progress("a short training with all slots", step + 1, settings.steps)
    recorded = RecordedLanguageModel(folder)
    certificate = recorded.dual.verify(progress=progress)
    tokens = text.encode(prompt)
    scanned, sizes = recorded.scores(tokens), recorded.scores(tokens, absolute=True)
    attention = recorded.dual.attend(tokens[None])[LAYER]
    signs = np.concatenate([(w.scores[0, -1] < 0).numpy() for w in attention.scores()])
    split = recorded.dual.contributions(tokens[None], target=lambda output: output[0][:, -1, unit])[OUTPUT]
    sums = split.sums(COLUMN)
    pushes, places = sums.totals[0].numpy(), sums.values[COLUMN].to_numpy()
    parts = split.parts().drop("query").to_dicts()[0]
    order = np.argsort(-pushes, kind="stable")

    def pushed(some: Any) -> list[Pushed]:
        return [Pushed(float(pushes[n]), int(sums.visits[n]), text.passage(int(places[n]), WIDTH)) for n in some]

    dualform.build_totals(folder, COLUMN, kind="keys")
    kept = RecordedLanguageModel(folder).scores(tokens)
    info = recorded.dual.info()
    found = Checked(
        settings.to_dict(),
        info["bytes"],
        info["layers"][0]["slots"],
        certificate.frame.select("parameter", "gap", "floor", "movement", "verdict").to_dicts(),
        certificate.passed,
        float(np.abs(kept.scores - scanned.scores).max() / np.abs(scanned.scores).max()),
        len(set(_best(scanned.scores)) & set(_best(sizes.scores))),
        float(signs.mean()),
        prompt,
        target,
        parts,
        float(torch.from_numpy(pushes).sum()),
        pushed(order[:TOP]),
        pushed(order[::-1][:TOP]),
    )
    shutil.rmtree(folder)
    return found


def _best(scores: np.ndarray[Any, Any]) -> list[int]:
    found: list[int] = np.argsort(-scores, kind="stable")[: 10 * TOP].tolist()
    return found


def _end(text: Text) -> tuple[str, str]:
    """Of a text without known queries: the end of its test part, and its last token."""
    ids = text.test.ids[-WIDTH:].tolist()
    return text.decode(ids[:-1]), text.vocabulary[ids[-1]]
