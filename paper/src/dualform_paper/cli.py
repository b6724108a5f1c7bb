"""The command that runs the paper's experiments."""

from __future__ import annotations

import sys
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dualform.cli.base import Data, Json, print_json, progress_bars
from dualform.progress import Progress

if TYPE_CHECKING:
    from dualform_paper.language.settings import Order as LanguageOrder

LOG_SECONDS = 60.0
"""Without a terminal, a line about the progress of a language model's training is printed this often."""


class Experiment(str, Enum):
    """The paper's experiments."""

    single_task = "single-task"
    joint = "joint"
    continual = "continual"
    images = "images"
    asides = "asides"
    aesop = "aesop"
    wikitext_2 = "wikitext-2"
    language = "language"
    transformer = "transformer"


LANGUAGE = {
    Experiment.aesop: ("aesop",),
    Experiment.wikitext_2: ("wikitext-2",),
    Experiment.language: ("aesop", "wikitext-2"),
}


class Size(str, Enum):
    """Language models as large as the paper's, or such that train in minutes."""

    paper = "paper"
    small = "small"


class LanguagePreset(str, Enum):
    """How the paper's language models are built and trained: as in the authors' code, or as the text says."""

    released = "released"
    text = "text"


class Preset(str, Enum):
    """How the paper's networks are trained: as the authors' code does, or as the text says."""

    reference = "reference"
    vanilla = "vanilla"


def paper(
    experiment: Annotated[
        Experiment,
        typer.Argument(
            help="images: single-task, joint and continual. asides: remarks 2.3 to 3.4, eq. 14 to 17. language: aesop and wikitext-2. transformer: remark 3.5."
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="How many trainings, each with another seed.")] = 5,
    first: Annotated[int, typer.Option("--seed", min=0, help="The first seed.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps of each phase.", show_default="the paper's: 3000, 5000, 3000 + 3000; 5000, 10000"
        ),
    ] = None,
    optimizer: Annotated[Preset, typer.Option(help="As the authors' code, or as the paper's text.")] = Preset.reference,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for results, figures and pages.")] = Path("runs/paper"),
    reverse: Annotated[bool, typer.Option("--reverse", help="continual: Fashion-MNIST first.")] = False,
    long: Annotated[bool, typer.Option("--long", help="continual: 7000 steps of the second task.")] = False,
    raw_pixels: Annotated[
        bool, typer.Option("--raw-pixels", help="Train on pixels from 0 to 1, not normalised.")
    ] = False,
    every_image: Annotated[
        bool,
        typer.Option("--every-image", help="Measure when top slots were written on all test images (minutes more)."),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the recordings (GBs for each seed).")] = False,
    preset: Annotated[
        LanguagePreset, typer.Option(help="language: as the authors' code, or as the paper's text.")
    ] = LanguagePreset.released,
    size: Annotated[Size, typer.Option(help="language: the paper's models, or small ones.")] = Size.paper,
    state_size: Annotated[int | None, typer.Option(min=1, help="language: width of the LSTM.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="language: train no longer than this.")] = None,
    all_slots: Annotated[
        bool, typer.Option("--slots", help="language: keep all slots, up to 20 GB, instead of totals per position.")
    ] = False,
    predicted: Annotated[
        float, typer.Option(help="language: the share of tokens, drawn in each step, whose next token is predicted.")
    ] = 1.0,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="language: steps between two checkpoints.", show_default="100")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that PyTorch may use.", show_default="one for each core")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the paper's experiments at full size and write a page with figures for each, beside the paper's numbers.

    The same command goes on with a run that was interrupted: what is finished is not done again, and the training of a language
    model goes on from its last checkpoint.
    """
    import torch

    from dualform_paper.language.settings import Order as LanguageOrder
    from dualform_paper.run import estimate, run, run_asides
    from dualform_paper.settings import Order

    if threads is not None:
        torch.set_num_threads(threads)
    asked = LanguageOrder(preset.value, size.value, steps, state_size, first, minutes, predicted, all_slots)
    if experiment in LANGUAGE:
        _language(LANGUAGE[experiment], asked, out, data, checkpoint_every, as_json)
        return
    if asked != LanguageOrder(steps=steps, seed=first) or checkpoint_every is not None:
        raise typer.BadParameter(
            "--preset, --size, --state-size, --minutes, --slots, --predicted and --checkpoint-every are for aesop, wikitext-2 and "
            "language.",
            param_hint="--size",
        )
    chosen = ["single-task", "joint", "continual", "asides"] if experiment is Experiment.images else [experiment.value]
    pages = {}
    with progress_bars() as progress:
        for one in chosen:
            if one == "transformer":
                pages[one] = _transformer(out / one, data, steps, first, keep, progress)
                continue
            if one == "asides":
                pages[one] = run_asides(out / one, keep=keep, progress=progress)
                continue
            if one != "continual" and experiment is not Experiment.images and (reverse or long):
                raise typer.BadParameter("--reverse and --long are variants of continual.", param_hint="--reverse")
            ordered = one == "continual"
            order = Order(
                one,
                optimizer.value,
                seeds,
                first,
                steps,
                reverse and ordered,
                long and ordered,
                raw_pixels,
                every_image,
            )
            expected, folder = estimate(order.settings, seeds, keep=keep), out / order.name
            print(
                f"{order.name}: {seeds} × {order.settings.steps} steps, about {expected.seconds / 60:.0f} min on two cores, "
                f"{expected.nbytes / 1e9:.1f} GB on the disk at a time; results in {folder}",
                file=sys.stderr,
            )
            pages[order.name] = run(
                order.settings, folder, seeds=seeds, data=data, keep=keep, command=order.command, progress=progress
            )
    if as_json:
        print_json({name: str(page) for name, page in pages.items()})
    else:
        for name, page in pages.items():
            print(f"{name}: {page}")


def _transformer(out: Path, data: Path | None, steps: int | None, seed: int, keep: bool, progress: Progress) -> Path:
    """Remark 3.5."""
    from dualform_paper.language import remark
    from dualform_paper.language.transformer import Settings

    settings = Settings(seed=seed) if steps is None else Settings(seed=seed, steps=steps)
    said = f" --steps {steps}" * (steps is not None) + f" --seed {seed}" * bool(seed)
    command = f"dualform paper transformer{said}"
    return remark.run(out, data=data, settings=settings, keep=keep, command=command, progress=progress)


def _language(
    names: tuple[str, ...],
    order: LanguageOrder,
    out: Path,
    data: Path | None,
    checkpoint_every: int | None,
    as_json: bool,
) -> None:
    """The paper's language experiments. Their recordings stay, for `dualform passages`."""
    from dualform_paper.language.corpora import load
    from dualform_paper.language.recording import CHECKPOINT_STEPS
    from dualform_paper.language.run import RECORDING, run

    pages = {}
    for name in names:
        settings = order.settings(name)
        text = load(name, data)
        folder = out / order.folder(name)
        totals_bytes = 4 * settings.shape(len(text.vocabulary)).key * len(text.train)
        kept = f"{totals_bytes / 1e9:.2f} GB of totals in memory, and up to twice that on the disk"
        if order.all_slots:
            kept = "all slots, up to 20 GB"
        limit = "" if order.minutes is None else f" or {order.minutes:g} minutes"
        print(
            f"{name}, preset {order.preset}: {settings.steps} steps{limit}, {kept}; results in {folder}",
            file=sys.stderr,
        )
        with progress_bars() as bars:
            pages[name] = run(
                text,
                settings,
                folder,
                keep="slots" if order.all_slots else "totals",
                minutes=order.minutes,
                checkpoint_every=checkpoint_every or CHECKPOINT_STEPS,
                command=order.command(name),
                progress=_with_log_lines(bars),
            )
    if as_json:
        print_json({name: str(page) for name, page in pages.items()})
        return
    for name, page in pages.items():
        print(f"{name}: {page}\n  dualform passages {page.parent / RECORDING} --prompt …")


def _with_log_lines(report: Progress) -> Progress:
    """Progress that also prints a line now and then where there is no terminal, for the log of a run in the background."""
    if sys.stderr.isatty():
        return report
    printed = time.monotonic()

    def logged(what: str, done: int, total: int) -> None:
        nonlocal printed
        report(what, done, total)
        if time.monotonic() - printed > LOG_SECONDS:
            printed = time.monotonic()
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return logged
