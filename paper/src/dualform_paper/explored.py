"""The runs of the image experiments, for the explorer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

import dualform
from dualform.explorer import Subject, check_sizes, fit_drawing, subject
from dualform_paper.settings import Phase, Settings
from dualform_paper.tasks import load
from dualform_paper.training import network


def read_run(folder: Path, content: dict[str, Any], data: Path | None) -> Subject:
    """Return the subject of a run. content: that of its `trained.json`; data: where datasets are."""
    given = dict(content["settings"])
    phases = tuple(Phase(tuple(map(str, phase["datasets"])), int(phase["steps"])) for phase in given.pop("phases"))
    settings = Settings(phases=phases, **given)
    check_sizes(settings.width, settings.batch)
    tasks = load(settings, data)
    first = next(iter(tasks.values()))
    low = float(first.train.min())
    high = float(first.train.max())

    def as_input(drawing: Tensor) -> Tensor:
        return (fit_drawing(drawing, 28, (20, 20)) * (high - low) + low).flatten()

    return subject(
        dualform.open(folder, network(settings)),
        {name: task.train for name, task in tasks.items()},
        {name: (task.test, task.test_labels) for name, task in tasks.items()},
        class_names={name: task.classes for name, task in tasks.items()},
        by=("dataset", "sample_id"),
        draw=as_input,
        title=f"{' and '.join(tasks)}, {settings.experiment}",
        ink=True,
    )
