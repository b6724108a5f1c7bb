"""A language experiment from text to page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import dualform
from dualform.language.recorded import RecordedLanguageModel
from dualform.language.text import Text
from dualform.progress import Progress, ignore_progress
from dualform_paper import pictures
from dualform_paper.language import page, ranks, report, ways
from dualform_paper.language.checks import check
from dualform_paper.language.ranks import measure_ranks
from dualform_paper.language.recording import CHECKPOINT_STEPS, train
from dualform_paper.language.settings import Settings
from dualform_paper.section import Section

TITLES = {"aesop": "Characters: Aesop’s Fables", "wikitext-2": "Words: WikiText-2"}
COMPARED = 8
"""Steps for which the ways to record are compared."""
RECORDING = "recording"


def run(
    text: Text,
    settings: Settings,
    out: Path,
    *,
    keep: str = "totals",
    minutes: float | None = None,
    checkpoint_every: int = CHECKPOINT_STEPS,
    command: str = "",
    progress: Progress = ignore_progress,
) -> Path:
    """Train with recording, ask, compare the ways to record, check with all slots; returns the page.

    The recording stays, for `dualform passages`. A run that was killed goes on from the last checkpoint of its training.
    keep: "totals" per position, or all "slots" of as many steps as 20 GB hold.
    """
    out.mkdir(parents=True, exist_ok=True)
    _, trained = train(
        text,
        settings,
        out / RECORDING,
        keep=keep,
        minutes=minutes,
        checkpoint_every=checkpoint_every,
        measure=measure_ranks(text) if keep == "totals" else None,
        progress=progress,
    )
    answers = report.ask(RecordedLanguageModel(out / RECORDING), progress=progress)
    ranks_section = ranks.section(trained.measured)
    sections = [
        page.learned(text, settings, trained),
        *([ranks_section] if ranks_section else []),
        *report.sections(text, answers, dropout=settings.dropout),
        page.costs(text, settings, ways.compare(text, settings, out / "ways", COMPARED, progress)),
    ]
    checked = check(text, settings, out / "slots", progress)
    sections += [page.proved(checked), page.split(checked)]
    shutil.rmtree(out / "ways", ignore_errors=True)
    return write_page(out, text.name, replace(settings, steps=trained.steps), sections, command)


def write_page(out: Path, name: str, settings: Settings, sections: Sequence[Section], command: str) -> Path:
    """results.json, a figure for each section that has curves, and index.md."""
    (out / "figures").mkdir(parents=True, exist_ok=True)
    parts = [
        f"# {TITLES.get(name, name)}",
        f"Made by `{command}`; section 5.5 and appendix C of the paper." if command else "",
    ]
    for section in sections:
        parts.append(section.markdown.strip())
        stem = section.title.lower().replace(" ", "-")
        if pictures.from_section(section.title, section.data, out / "figures" / stem):
            parts.append(f"![{section.title}](figures/{stem}.png)")
    results = {
        "dualform": dualform.__version__,
        "torch": str(torch.__version__),
        "command": command,
        "threads": torch.get_num_threads(),
        "settings": settings.to_dict(),
        "sections": [{"title": section.title, "data": section.data} for section in sections],
    }
    (out / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False))
    (out / "index.md").write_text("\n\n".join(part for part in parts if part) + "\n")
    return out / "index.md"
