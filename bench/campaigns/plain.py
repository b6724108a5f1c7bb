"""The trainings of the fuzz campaign without dualform: the truth, in plain PyTorch and NumPy.

The network is trained in an ordinary loop. Beside it, the gradient of each row's own loss is asked of autograd, which says what each row
wrote, whatever the layers are. `replay` from tests/reference turns these gradients into parts of the weights.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from campaigns.fuzz_cases import PARTS, Case
from campaigns.fuzz_networks import Data, data

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from reference.replay import Replay, Track  # type: ignore[import-not-found]

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Plain:
    """What an ordinary training gives."""

    model: nn.Module
    weights: dict[str, Array]
    """At the end, by parameter."""
    initial: dict[str, Array]
    """What is left of the first weights, without any gradient."""
    parts: list[dict[str, Array]]
    """What the rows of each part have written."""
    coefficients: dict[str, list[Array]] = field(default_factory=dict)
    """Of each vector: what a gradient of 1 in each step has become by the end, in every element."""
    keys: dict[str, list[Array]] = field(default_factory=dict)
    """Of each nn.Linear: its inputs, (rows × positions, d_in) for each call."""
    errors: dict[str, list[Array]] = field(default_factory=dict)
    """The gradients of the loss with respect to its outputs, in the same order."""
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, sample, part) of each row."""


def train(case: Case) -> Plain:
    """Train in an ordinary loop; the first weights, the samples and the random numbers are those of the recorded one."""
    model = case.network()
    samples = data(case.spec, case.seed, case.dtype)
    optimizers = case.optimizers(model)
    begin = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    replays = _replays(case, model, begin)
    impulses = _impulses(case, replays, begin)
    groups = _groups(model, optimizers)
    rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
    found = Plain(model, {}, {}, [])
    torch.manual_seed(case.seed)
    with _captured(model, found):
        for number, step in enumerate(case.steps):
            gradients = [_zeros(model) for _ in range(PARTS)]
            for one in optimizers:
                one.zero_grad()
            for batch in step.batches:
                found.rows += [(number, i, part) for i, part in zip(batch.ids, batch.parts, strict=True)]
                losses = _losses(case, model, samples, torch.tensor(batch.ids, dtype=torch.int64))
                if not case.spec.rows_interact and not case.autocast:
                    _add_rows(gradients, model, losses, batch.parts, batch.weight)
                (losses.sum() * (batch.weight * case.scale)).backward()  # type: ignore[no-untyped-call]
            factor = _scale_and_clip(model, case.scale, step.clip)
            for one, its in zip(optimizers, rates, strict=True):
                for group, rate in zip(one.param_groups, its, strict=True):
                    group["lr"] = rate * step.lr_factor
                one.step()
            for name, replay in replays.items():
                parameter = model.get_parameter(name)
                if parameter.grad is None:
                    continue
                parts = [part[name] * factor for part in gradients]
                zero = np.zeros_like(parts[0])
                replay.step([sum(parts, zero), zero, *parts], **groups[name])
                if name in impulses:
                    seen = parameter.grad.double().numpy()
                    ones = [np.full_like(zero, n == number) for n in range(len(case.steps))]
                    impulses[name].step([seen, *ones], **groups[name])
    found.weights = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    found.initial = {name: replay.tracks[1].theta for name, replay in replays.items()}
    found.coefficients = {name: [track.theta for track in one.tracks[1:]] for name, one in impulses.items()}
    found.parts = [{name: replay.tracks[2 + n].theta for name, replay in replays.items()} for n in range(PARTS)]
    return found


def _replays(case: Case, model: nn.Module, begin: dict[str, Array]) -> dict[str, Any]:
    """The training, the first weights alone, and each part alone, of every trained parameter."""
    found = {}
    for place, (name, _) in enumerate(model.named_parameters()):
        if place not in case.frozen:
            zeros = [Track(np.zeros_like(begin[name])) for _ in range(PARTS)]
            found[name] = Replay(case.kind, [Track(begin[name]), Track(begin[name]), *zeros])
    return found


def _impulses(case: Case, replays: dict[str, Any], begin: dict[str, Array]) -> dict[str, Any]:
    """The training of each vector by the gradients that its optimizer saw, and one track for a gradient of 1 in each step."""
    vectors = [name for name in replays if begin[name].ndim == 1]
    steps = len(case.steps)
    return {
        name: Replay(case.kind, [Track(begin[name]), *(Track(np.zeros_like(begin[name])) for _ in range(steps))])
        for name in vectors
    }


def _groups(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """The group of each parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for one in optimizers for group in one.param_groups for p in group["params"]}


def _zeros(model: nn.Module) -> dict[str, Array]:
    return {name: np.zeros(tuple(p.shape)) for name, p in model.named_parameters()}


def _losses(case: Case, model: nn.Module, samples: Data, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        return samples.losses(model(samples.inputs[ids]), ids)


def _add_rows(
    gradients: list[dict[str, Array]], model: nn.Module, losses: Tensor, parts: list[int], weight: float
) -> None:
    """Add the gradient of each row's own loss to those of its part."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for row, part in enumerate(parts):
        each = torch.autograd.grad(losses[row] * weight, list(trained.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(trained, each, strict=True):
            if gradient is not None:
                gradients[part][name] += gradient.double().numpy()


def _scale_and_clip(model: nn.Module, scale: float, clip: float | None) -> float:
    """Undo the scale, clip by the norm; gives the factor of the clipping."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        gradient.div_(scale)
    if clip is None:
        return 1.0
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    return min(1.0, clip / (norm + 1e-6))


@contextlib.contextmanager
def _captured(model: nn.Module, found: Plain) -> Iterator[None]:
    """Keep inputs and output gradients of linear layers, by hooks as plain as can be."""
    handles = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            found.keys[name], found.errors[name] = [], []
            handles.append(module.register_forward_hook(partial(_keep, found.keys[name], found.errors[name])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep(keys: list[Array], errors: list[Array], _: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
    key = arguments[0].detach()
    place = len(keys)
    keys.append(key.reshape(-1, key.shape[-1]).double().numpy().copy())
    errors.append(np.zeros((len(keys[-1]), output.shape[-1])))

    def keep(gradient: Tensor) -> None:  # the last backward pass is that of the whole loss
        errors[place] = gradient.reshape(-1, gradient.shape[-1]).double().numpy().copy()

    if output.requires_grad:
        output.register_hook(keep)  # type: ignore[no-untyped-call]
