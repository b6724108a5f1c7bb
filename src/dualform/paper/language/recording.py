"""A language model's training, recorded: it can be stopped at any time and goes on from its last checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dualform
from dualform.errors import RecordingError
from dualform.paper.language import beside
from dualform.paper.language.model import LanguageModel, State, built
from dualform.paper.language.reading import batch
from dualform.paper.language.settings import Settings
from dualform.paper.language.shape import LAYER
from dualform.paper.language.text import Text
from dualform.paper.language.training import adam, evaluate, start, train_step
from dualform.paper.settings import completed

Progress = Callable[[str, int, int], None]
TRAINED, CHECKPOINT = "trained.json", "checkpoint-{step}.safetensors"
CHECKPOINT_SECONDS = 600.0
BOUND = 20e9
"""What all slots may take on the disk."""
CURVE_POINTS, CURVE_TOKENS = 40, 10_000
"""The learning curve: so many points, each measured on so many tokens of the test text."""


@dataclass
class Trained:
    """What a training has come to."""

    settings: dict[str, Any]
    keep: str
    steps: int = 0
    seconds: float = 0.0
    """Of training and recording, without evaluation."""
    nbytes: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, nats per token of the last stretch of training)"""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, nats per token of the test text's beginning)"""
    test: float | None = None
    """Nats per token of the whole test text."""


def options(text: Text, settings: Settings, keep: str) -> dict[str, Any]:
    """What dualform.record() is told. keep: "totals" (sums of keys by position) or "slots" (everything, float16)."""
    if keep == "slots":
        return {"layers": [LAYER], "dtype": "float16"}
    wide = settings.shape(len(text.vocabulary)).key
    return {
        "layers": [LAYER],
        "keep": "totals",
        "totals": {beside.COLUMN: "keys"},
        "totals_bytes": 4 * wide * len(text.train) + (1 << 20),
    }


def train(
    text: Text,
    settings: Settings,
    folder: Path,
    *,
    keep: str = "totals",
    minutes: float | None = None,
    progress: Progress = lambda what, done, total: None,
) -> tuple[LanguageModel, Trained]:
    """Train and record until settings.steps, or for so many minutes. What a checkpoint holds is not done again.

    keep: "totals" per position, or "slots": all of them, as many steps as BOUND has room for.
    """
    if keep == "slots":
        settings = replace(settings, steps=max(1, min(settings.steps, int(BOUND / settings.slot_bytes))))
    model = built(settings.shape(len(text.vocabulary)), settings.seed)
    optimizer, state = adam(model, settings), start(model, settings.batch)
    trained = Trained(replace(settings, steps=0).to_dict(), keep)
    found = _checkpoint(folder, trained)
    if found is not None:
        trained, tensors = found
        state = _restore(model, optimizer, tensors)
    if trained.steps >= settings.steps:
        return model, _tested(text, model, folder, trained, progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    resume = {"resume": trained.steps} if trained.steps else {"overwrite": True}
    began = saved = time.perf_counter()
    aside, before, recent = 0.0, trained.seconds, list[float]()
    every = max(1, settings.steps // CURVE_POINTS)
    with dualform.record(model, optimizer, folder, **options(text, settings, keep), **resume) as recorder:
        beside.write(folder, beside.Beside(text, model.shape))
        for step in range(trained.steps, settings.steps):
            read = batch(text.train.ids, step, settings.batch, settings.window)
            recorder.batch(**{beside.COLUMN: read.positions})
            loss, state = train_step(model, optimizer, read, state, step, settings)
            recorder.log(loss=loss)
            recent.append(loss)
            trained.steps, trained.seconds = step + 1, before + time.perf_counter() - began - aside
            late = minutes is not None and trained.seconds - before > 60 * minutes
            if trained.steps % every == 0 or late or trained.steps == settings.steps:
                paused = time.perf_counter()
                trained.losses.append((trained.steps, sum(recent) / len(recent)))
                trained.curve.append((trained.steps, evaluate(model, text.test.ids, most=CURVE_TOKENS)))
                recent = []
                aside += time.perf_counter() - paused
            progress("training", trained.steps, settings.steps)
            if late or trained.steps == settings.steps:
                break
            if time.perf_counter() - saved > CHECKPOINT_SECONDS:
                _save(folder, model, optimizer, state, trained)
                recorder.seal()
                _only(folder, trained.steps)
                saved = time.perf_counter()
        _save(folder, model, optimizer, state, trained)
    _only(folder, trained.steps)
    return model, _tested(text, model, folder, trained, progress)


def _tested(text: Text, model: LanguageModel, folder: Path, trained: Trained, progress: Progress) -> Trained:
    """With the whole test text measured, once."""
    path = folder / TRAINED
    if path.exists():
        known = Trained(**json.loads(path.read_text()))
        if known.steps == trained.steps:
            return known
    trained.nbytes = dualform.open(folder).info()["bytes"]
    progress("test text", 0, 1)
    trained.test = evaluate(model, text.test.ids)
    progress("test text", 1, 1)
    path.write_text(json.dumps(asdict(trained), indent=1))
    return trained


def _save(folder: Path, model: LanguageModel, optimizer: torch.optim.Adam, state: State, trained: Trained) -> None:
    tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"adam.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    tensors |= {"state.hidden": state[0].contiguous(), "state.cell": state[1].contiguous()}
    path = folder / CHECKPOINT.format(step=trained.steps)
    save_file(tensors, folder / f".{path.name}", {"trained": json.dumps(asdict(trained))})
    (folder / f".{path.name}").replace(path)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """By their steps."""
    return {int(path.stem.split("-")[1]): path for path in folder.glob(CHECKPOINT.format(step="*"))}


def _only(folder: Path, step: int) -> None:
    """Without the checkpoints before this one, now that the recording is sealed there: until then, they were needed."""
    for other, path in _checkpoints(folder).items():
        if other != step:
            path.unlink()


def _checkpoint(folder: Path, wanted: Trained) -> tuple[Trained, dict[str, Tensor]] | None:
    """The last checkpoint of the same training that the recording has come to, with its tensors."""
    from safetensors import safe_open

    known = _checkpoints(folder)
    sealed = dualform.open(folder).end_step if known else 0
    path = known.get(max((step for step in known if step <= sealed), default=0))
    if path is None:
        return None
    with safe_open(path, "pt") as file:
        trained = Trained(**json.loads(file.metadata()["trained"]))
    trained.settings = completed(Settings, trained.settings)
    if (trained.settings, trained.keep) != (wanted.settings, wanted.keep):
        raise RecordingError(
            f"{folder} holds another training ({trained.keep}, {trained.settings}). Choose another folder, or remove it."
        )
    return trained, load_file(path)


def _restore(model: LanguageModel, optimizer: torch.optim.Adam, tensors: dict[str, Tensor]) -> State:
    model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
    for name, parameter in model.named_parameters():
        prefix = f"adam.{name}."
        optimizer.state[parameter] = {
            key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
        }
    return tensors["state.hidden"], tensors["state.cell"]
