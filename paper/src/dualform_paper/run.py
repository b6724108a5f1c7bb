"""An image experiment from data to page: every seed trained, verified and measured; what is done is not done again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dualform
from dualform.progress import Progress, ignore_progress
from dualform_paper import asides, pictures
from dualform_paper.analysis import Analysis, analyse
from dualform_paper.page import page
from dualform_paper.section import Section
from dualform_paper.settings import LAYERS, Settings, completed
from dualform_paper.summary import lists_over, over
from dualform_paper.tasks import Task, load

SLOT_BYTES = 8_000
"""About what a slot takes in all three layers in float16: keys and error signals of 784 + 4 × 800 + 10 numbers, and tables."""
TIMES = 5
"""About how many times the bare training everything takes."""
STEP_SECONDS = 0.008
"""About what a step takes without recording on two cores."""


@dataclass(frozen=True)
class Estimate:
    """What to expect before it begins."""

    seconds: float
    nbytes: int
    """At a time: a seed's recording is removed when it has been measured, unless it is to be kept."""


def estimate(settings: Settings, seeds: int, *, keep: bool) -> Estimate:
    """Time and disk, roughly, on two cores."""
    one = settings.slots * SLOT_BYTES
    return Estimate(settings.steps * STEP_SECONDS * TIMES * seeds, one * (seeds if keep else 1))


def run(
    settings: Settings,
    out: Path,
    *,
    seeds: int = 5,
    data: Path | None = None,
    keep: bool = False,
    command: str = "",
    progress: Progress = ignore_progress,
) -> Path:
    """Run all seeds and write results.json, figures and index.md into `out`; gives the page. keep: the recordings, too."""
    tasks = load(settings, data)
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for number in range(seeds):
        mine = replace(settings, seed=settings.seed + number)
        progress("seeds", number, seeds)
        found.append(_seed(mine, tasks, out, draw=number == 0, keep=keep, progress=progress))
    progress("seeds", seeds, seeds)
    _write(
        out / "results.json",
        {"dualform": dualform.__version__, "torch": str(torch.__version__), "command": command, "seeds": found},
    )
    return write_page(out, command)


def write_page(out: Path, command: str) -> Path:
    """The page and the figures over all seeds, from results.json and the figures of single examples."""
    seeds = [_completed(seed) for seed in json.loads((out / "results.json").read_text())["seeds"]]
    experiment, names = seeds[0]["settings"]["experiment"], list(seeds[0]["datasets"])
    drawn = json.loads((out / "figures" / "pictures.json").read_text())
    others = {"inputs": pictures.Picture(**drawn["inputs"])}
    examples = [[pictures.Picture(**one) for one in several] for several in drawn["examples"]]
    folder = out / "figures"
    if experiment == "single-task":
        columns = ("target_wrong", "output_wrong", "right")
        table = {y: {c: over(seeds, "datasets", "mnist", "table", y, c) for c in columns} for y in LAYERS}
        others["table 1"] = pictures.table_one(table, folder)
    shares = {
        y: {k: lists_over(seeds, "datasets", names[0], "layers", y, "recency", k) for k in ("first", "all", "late")}
        for y in LAYERS
    }
    others["recency"] = pictures.recency(shares, folder)
    if experiment == "continual":
        masks = {mask: {name: over(seeds, "masks", mask, name) for name in names} for mask in seeds[0]["masks"]}
        others["masks"] = pictures.masks(masks, names, folder)
    (out / "index.md").write_text(page(experiment, command, seeds, examples, others))
    return out / "index.md"


def run_asides(out: Path, *, keep: bool = False, progress: Progress = ignore_progress) -> Path:
    """Run the remarks and asides and write their page, with a figure for each that has curves. keep: the recording, too."""
    recording = out / "recording"
    sections = asides.run(recording, progress)
    if not keep:
        shutil.rmtree(recording)
    return write_asides(out, sections)


def write_asides(out: Path, sections: Sequence[Section]) -> Path:
    """The page of the remarks and asides."""
    (out / "figures").mkdir(parents=True, exist_ok=True)
    parts = ["# Remarks and asides", "Made by `dualform paper asides`, on scikit-learn's digits, one seed."]
    for number, section in enumerate(sections):
        parts.append(section.markdown.strip())
        stem = f"aside-{number + 1}"
        if pictures.from_section(section.title, section.data, out / "figures" / stem):
            parts.append(f"![{section.title}](figures/{stem}.png)")
    _write(out / "results.json", [{"title": section.title, "data": section.data} for section in sections])
    (out / "index.md").write_text("\n\n".join(parts) + "\n")
    return out / "index.md"


def _seed(
    settings: Settings, tasks: Mapping[str, Task], out: Path, *, draw: bool, keep: bool, progress: Progress
) -> dict[str, Any]:
    """One seed; what an earlier run has measured with the same settings is taken from its file."""
    path, recording = out / f"seed-{settings.seed}.json", out / "recordings" / f"seed-{settings.seed}"
    if path.exists() and (not draw or _is_drawn(settings, out / "figures")):
        found = _completed(json.loads(path.read_text()))
        if found["settings"] == _plain(settings):
            return found
    analysis = analyse(settings, tasks, recording, progress, thorough=draw)
    if draw:
        _draw(settings, analysis, tasks, out / "figures")
    _write(path, analysis.numbers)
    if not keep:
        shutil.rmtree(recording)
        if not any(recording.parent.iterdir()):
            recording.parent.rmdir()
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def _completed(found: dict[str, Any]) -> dict[str, Any]:
    """What a file has, which an earlier version may have written."""
    return found | {"settings": completed(Settings, found["settings"])}


def _plain(settings: Settings) -> Any:
    """As they come back from a file."""
    return json.loads(json.dumps(settings.to_dict()))


def _is_drawn(settings: Settings, folder: Path) -> bool:
    """Whether the figures are of this seed: another run may have begun with another one."""
    path = folder / "pictures.json"
    return path.exists() and _completed(json.loads(path.read_text()))["settings"] == _plain(settings)


def _draw(settings: Settings, analysis: Analysis, tasks: Mapping[str, Task], folder: Path) -> None:
    splits = [one["contributions"] for one in analysis.numbers["examples"]]
    drawn = pictures.of_examples(analysis.examples, splits, tasks, folder)
    gallery = pictures.gallery(analysis.examples, tasks, folder)
    _write(
        folder / "pictures.json",
        {
            "settings": settings.to_dict(),
            "inputs": vars(gallery),
            "examples": [[vars(one) for one in some] for some in drawn],
        },
    )


def _write(path: Path, content: Any) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1))
    beside.replace(path)
