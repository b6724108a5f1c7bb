"""The command that runs the paper's experiments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dualform.cli.base import Data, Json, app, one_line_errors, print_json, progress_bars

if TYPE_CHECKING:
    pass


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


class Preset(str, Enum):
    """How the paper's networks are trained: as the authors' code does, or as the text says."""

    reference = "reference"
    vanilla = "vanilla"


@app.command()
@one_line_errors
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
    size: Annotated[Size, typer.Option(help="language: the paper's models, or small ones.")] = Size.paper,
    state_size: Annotated[int | None, typer.Option(min=1, help="language: width of the LSTM.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="language: train no longer than this.")] = None,
    all_slots: Annotated[
        bool, typer.Option("--slots", help="language: keep all slots, up to 20 GB, instead of totals per position.")
    ] = False,
    predicted: Annotated[
        float, typer.Option(help="language: the share of tokens, drawn in each step, whose next token is predicted.")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Run the paper's experiments at full size and write a page with figures for each, beside the paper's numbers.

    What an interrupted run has finished is not done again.
    """
    from dualform.paper.run import estimate, run, run_asides
    from dualform.paper.settings import Order

    if experiment in LANGUAGE:
        _language(
            LANGUAGE[experiment],
            out,
            data,
            size.value,
            steps,
            state_size,
            first,
            minutes,
            predicted,
            all_slots,
            as_json,
        )
        return
    if size is not Size.paper or state_size is not None or minutes is not None or predicted != 1 or all_slots:
        raise typer.BadParameter(
            "--size, --state-size, --minutes, --slots and --predicted are for aesop, wikitext-2 and language.",
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


def _transformer(
    out: Path, data: Path | None, steps: int | None, seed: int, keep: bool, progress: Callable[[str, int, int], None]
) -> Path:
    """Remark 3.5."""
    from dualform.paper.language import remark
    from dualform.paper.language.transformer import Settings

    settings = Settings(seed=seed) if steps is None else Settings(seed=seed, steps=steps)
    said = f" --steps {steps}" * (steps is not None) + f" --seed {seed}" * bool(seed)
    command = f"dualform paper transformer{said}"
    return remark.run(out, data=data, settings=settings, keep=keep, command=command, progress=progress)


def _language(
    names: tuple[str, ...],
    out: Path,
    data: Path | None,
    size: str,
    steps: int | None,
    state: int | None,
    seed: int,
    minutes: float | None,
    predicted: float,
    all_slots: bool,
    as_json: bool,
) -> None:
    """The paper's language experiments: the recordings stay, for `dualform passages`."""
    from dualform.paper.language.run import RECORDING, run
    from dualform.paper.language.settings import settings_for
    from dualform.paper.language.text import load

    given = {"--size": size, "--steps": steps, "--state-size": state, "--seed": seed or None, "--minutes": minutes}
    given |= {"--predicted": predicted if predicted != 1 else None}
    said = " ".join(f"{option} {value}" for option, value in given.items() if value is not None)
    said += " --slots" if all_slots else ""
    pages = {}
    for name in names:
        settings = settings_for(name, size, steps=steps, state=state, seed=seed, predicted=predicted)
        text, folder = load(name, data), out / name
        nbytes = 4 * settings.shape(len(text.vocabulary)).key * len(text.train)
        kept = (
            "all slots, up to 20 GB" if all_slots else f"{nbytes / 1e9:.2f} GB of totals (in memory, then on the disk)"
        )
        limit = "" if minutes is None else f" or {minutes:g} minutes"
        print(
            f"{name}: {settings.steps} steps{limit}, {kept}; results in {folder}",
            file=sys.stderr,
        )
        with progress_bars() as progress:
            command = f"dualform paper {name} {said}"
            pages[name] = run(
                text,
                settings,
                folder,
                keep="slots" if all_slots else "totals",
                minutes=minutes,
                command=command,
                progress=progress,
            )
    if as_json:
        print_json({name: str(page) for name, page in pages.items()})
    else:
        for name, page in pages.items():
            print(f"{name}: {page}\n  dualform passages {out / name / RECORDING} --prompt …")
