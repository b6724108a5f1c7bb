"""Everything that is measured on one training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dualform
from dualform.progress import Progress
from dualform_paper import claims, contributed, forgetting
from dualform_paper.examples import RULES, Candidates, Example, choose, look
from dualform_paper.settings import LAYERS, Settings
from dualform_paper.table import by_class, raw_totals, votes
from dualform_paper.tasks import Task
from dualform_paper.training import answers, network, train


@dataclass(frozen=True)
class Analysis:
    """One seed: numbers for results.json, and the examples that figures show."""

    numbers: dict[str, Any]
    examples: list[Example]


def analyse(
    settings: Settings, tasks: Mapping[str, Task], folder: Path, progress: Progress, *, thorough: bool = True
) -> Analysis:
    """Train (if that has not been done), verify, and measure. thorough: also what needs every test image's best slots."""
    began = time.perf_counter()
    trained = train(settings, tasks, folder, progress)
    dual = dualform.open(folder, network(settings))
    certificate = dual.verify(progress=progress)
    if not dual.info()["totals"]:
        dualform.build_totals(folder, ["dataset", "label"], progress=progress)
        dual = dualform.open(folder, network(settings))
    model = dual.model()
    answered = {name: answers(model, task.test) for name, task in tasks.items()}
    first = dual.at(settings.phases[0].steps).model()
    numbers: dict[str, Any] = {
        "settings": settings.to_dict(),
        "trained": asdict(trained),
        "certificate": certificate.frame.select("parameter", "gap", "floor", "movement", "verdict").to_dicts(),
        "verified": certificate.passed,
        "datasets": {},
    }
    elected: dict[str, Tensor] = {}
    for own, (name, task) in enumerate(tasks.items()):
        progress("measuring", own, len(tasks))
        found, elected[name] = _measured(dual, settings, task, own, answered[name], tasks, thorough=thorough)
        numbers["datasets"][name] = found
    progress("measuring", len(tasks), len(tasks))
    chosen = {}
    for rule in RULES[settings.experiment]:
        if rule.dataset in tasks:
            task = tasks[rule.dataset]
            before = answers(first, task.test)
            chosen[rule] = choose(
                rule, Candidates(task.test_labels, answered[rule.dataset], before, elected[rule.dataset])
            )
    examples = look(dual, settings, tasks, chosen, answered)
    images = torch.stack([tasks[e.rule.dataset].test[e.place] for e in examples])
    parts = contributed.splits(dual, settings, images, torch.tensor([e.answer for e in examples]))
    numbers["examples"] = [_plain(example, split) for example, split in zip(examples, parts, strict=True)]
    if settings.experiment == "continual":
        numbers["masks"] = forgetting.masks(dual, settings, tasks)
        numbers["given back"] = forgetting.given_back(dual, settings)
        one = next((e for e in examples if e.rule.key == "one" and e.label == 1 != e.answer), None)
        if one is not None:
            image = tasks[one.rule.dataset].test[one.place]
            numbers["the misread one"] = forgetting.with_and_without(dual, settings, image)
    numbers["seconds"] = time.perf_counter() - began
    return Analysis(numbers, examples)


def _measured(
    dual: dualform.Dual,
    settings: Settings,
    task: Task,
    own: int,
    answered: Tensor,
    tasks: Mapping[str, Task],
    *,
    thorough: bool,
) -> tuple[dict[str, Any], Tensor]:
    """Table 1 and the claims for one test set; and the class that the last layer's totals elect."""
    labels, right = task.test_labels, answered == task.test_labels
    attention, rows = dual.attend(task.test), claims.Rows.of(dual, settings.datasets)
    found: dict[str, Any] = {"accuracy": float(right.double().mean()), "table": {}, "layers": {}}
    totals = torch.zeros(0)
    for layer in LAYERS:
        apart = by_class(attention[layer].total(["dataset", "label"], absolute=True), settings.datasets)
        totals = apart.sum(1)
        found["table"][layer] = asdict(votes(totals, labels, answered))
        measured: dict[str, Any] = {"depth": claims.depth(totals, labels)}
        if len(tasks) > 1:
            measured["cross-task"] = claims.cross_task(apart, own)
        if thorough:
            best = attention[layer].best(10, absolute=True).slots.numpy()
            some = dual.attend(task.test[:: settings.every])[layer].best(settings.top, absolute=True).slots.numpy()
            measured["wrong top"] = claims.wrong_top(best, rows, labels.numpy(), right.numpy())
            measured["hubs"] = claims.hubs(best, rows)
            measured["recency"] = claims.recency(some, rows, settings.steps)
            if len(tasks) > 1:
                measured["cross-task top"] = claims.cross_task_top(best, own, rows)
        if settings.experiment == "continual":
            measured["interference"] = forgetting.interference(apart, settings, right)
        if len(tasks) == 1 and layer != LAYERS[0]:
            weighed = claims.weighed_by_value(dual, layer, attention[layer].queries[:, 0])
            measured["weighed by value"] = asdict(votes(weighed, labels, answered))
        found["layers"][layer] = measured
    if len(tasks) == 1:
        raw = raw_totals(dual.rows, {name: t.train_pixels for name, t in tasks.items()}, task.test_pixels)
        found["raw pixels"] = asdict(votes(raw, labels, answered))
    signed = contributed.contribution_votes(dual, settings, task.test, labels, answered)
    found["contribution votes"] = {layer: asdict(vote) for layer, vote in signed.items()}
    return found, totals.argmax(1)


def _plain(example: Example, split: dict[str, Any]) -> dict[str, Any]:
    return {
        "example": example.rule.key,
        "rule": example.rule.words,
        "fits the rule": example.fitted,
        "dataset": example.rule.dataset,
        "test image": example.place,
        "label": example.label,
        "answer": example.answer,
        "layers": {
            layer: {
                "totals": {f"{name} {label}": total for (name, label), total in one.totals.items()},
                "best slots": [asdict(match) for match in one.by_slot[:3]],
                "best images": [asdict(match) for match in one.by_image[:3]],
            }
            for layer, one in example.looks.items()
        },
        "contributions": split,
    }
