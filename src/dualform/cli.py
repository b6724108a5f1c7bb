"""The command line: `dualform --help` lists what there is to ask.

Exit codes: 0 all is well; 1 a parameter is not verified; 2 the command or the store cannot be used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dualform.errors import DualformError
from dualform.version import __version__

if TYPE_CHECKING:
    import polars as pl

    import dualform
    from dualform.evaluate.evaluation import Evaluator
    from dualform.evaluate.fewer import FewOut

FAILED, UNUSABLE = 1, 2
EXTRAS = {
    "sklearn": "demo",
    "matplotlib": "demo",
    "pooch": "paper",
    "fastapi": "explorer",
    "uvicorn": "explorer",
    "plotly": "explorer",
}
"""Packages that only some commands need, and the extra that brings them."""


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


class Kind(str, Enum):
    """What totals keep of a group."""

    keys = "keys"
    deltas = "deltas"
    both = "both"


class KeyPart(str, Enum):
    """The parts of a recurrent layer's keys."""

    both = "both"
    input = "input"
    recurrent = "recurrent"


class Gate(str, Enum):
    """The gates of an LSTM."""

    i = "i"
    f = "f"
    g = "g"
    o = "o"


class Method(str, Enum):
    """How influence is estimated."""

    whitened = "whitened"
    kernel = "kernel"
    sketch = "sketch"


P = ParamSpec("P")


def _one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """What the library raises or warns of on purpose becomes one line on standard error."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
                command(*args, **kwargs)
        except BrokenPipeError:
            raise  # whoever read standard output has gone: nothing is wrong with the store
        except (DualformError, OSError) as error:
            problem = " ".join(str(error).split())
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").split(".")[0])
            if extra is None:
                raise
            problem = f"this command needs {error.name}: pip install 'dualform[{extra}]'."
        else:
            return
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(UNUSABLE)

    return run


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder given to dualform.record().", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dualform {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Record how a PyTorch network is trained; then ask, exactly, where a prediction comes from."""


@app.command()
@_one_line_errors
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the recording and the figure.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Decides the split, the first weights and the order.")] = 0,
    figure: Annotated[bool, typer.Option("--figure/--no-figure", help="Draw sources.png and sources.svg.")] = True,
    as_json: Json = False,
) -> None:
    """Train a digits network with recording, verify it, and show where two of its answers come from."""
    from dualform.demo import Settings, run
    from dualform.terminal import show_demo

    with _progress() as progress:
        found = run(out, Settings(seed=seed), progress)
        drawn: list[Path] = []
        if figure:
            from dualform.figures.sources import save

            progress("drawing", 0, 1)
            drawn = save([found.right, found.wrong], out / "sources")
            progress("drawing", 1, 1)
    if as_json:
        _print_json({**found.to_dict(), "figures": [str(path) for path in drawn]})
    else:
        show_demo(Console(), found, drawn)
    if not found.certificate.passed:
        raise typer.Exit(FAILED)


@app.command()
@_one_line_errors
def info(run: Run, as_json: Json = False) -> None:
    """Say what a recording holds."""
    import dualform
    from dualform.terminal import show_info

    found = dualform.open(run).info()
    if as_json:
        _print_json(found)
    else:
        show_info(Console(), found)


@app.command()
@_one_line_errors
def verify(
    run: Run,
    step: Annotated[
        int | None,
        typer.Option(help="Verify the network as it was after this many steps.", show_default="the end"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="So many parameters or segments of training at a time.")] = 1,
    as_json: Json = False,
) -> None:
    """Compare each recorded parameter with its dual form. Exits with 1 unless all of them pass."""
    import dualform
    from dualform.terminal import show_certificate

    dual = dualform.open(run)
    if step is not None:
        dual = dual.until(step)
    with _progress() as progress:
        certificate = dual.verify(workers=workers, progress=progress)
    if as_json:
        print(certificate.to_json())
    else:
        show_certificate(Console(), certificate)
    if not certificate.passed:
        raise typer.Exit(FAILED)


@app.command()
@_one_line_errors
def totals(
    run: Run,
    by: Annotated[
        list[str], typer.Option(help="The column that makes the groups; several make one grouping.", show_default=False)
    ],
    kind: Annotated[
        Kind, typer.Option(help="keys: key sums; deltas: each group's part of the weights; both.")
    ] = Kind.both,
    as_json: Json = False,
) -> None:
    """Build totals from a recording's slots and keep them with it. Totals that are there stay."""
    if len(set(by)) < len(by):
        raise typer.BadParameter("each column is given once.", param_hint="--by")

    import dualform
    from dualform.terminal import show_totals

    with _progress() as progress:
        dualform.build_totals(run, by, kind=kind.value, progress=progress)
    store = dualform.open(run).store
    kept = store.manifest.totals
    assert kept is not None  # just built
    number = [grouping.columns for grouping in kept.groupings].index(tuple(by))
    built = {"by": by, "kind": kept.groupings[number].kind, "groups": store.groups(number).height}
    nbytes = sum(file.size for file in kept.files.values())
    if as_json:
        _print_json({**built, "groupings": len(kept.groupings), "bytes": nbytes})
    else:
        show_totals(Console(), built, len(kept.groupings), nbytes)


@app.command()
@_one_line_errors
def influence(
    run: Run,
    test: Annotated[
        Path, typer.Option(help="Test inputs, an entry each: .npy, .safetensors or .parquet.", show_default=False)
    ],
    named: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODULE:NAME",
            help="The architecture: a model, or a function that gives one; the module is imported, from the current folder too.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[int] | None, typer.Option(help="The class, or one for each input.", show_default="the model's answer")
    ] = None,
    method: Annotated[Method, typer.Option(help="kernel and sketch: for softmax cross-entropy.")] = Method.whitened,
    top: Annotated[int, typer.Option(min=1, help="So many for each input.")] = 10,
    by: Annotated[
        list[str] | None,
        typer.Option(help="Sum over the rows of a column, e.g. sample_id.", show_default="single rows"),
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Of this layer alone.", show_default="all, summed")] = None,
    where: Annotated[str | None, typer.Option(help='Only these rows: SQL, e.g. "label = 7 and step >= 100".')] = None,
    lowest: Annotated[bool, typer.Option("--lowest", help="What speaks against the target most.")] = False,
    segments: Annotated[int, typer.Option(min=1, help="At most so many epochs, spread over the run.")] = 15,
    as_json: Json = False,
) -> None:
    """Estimate which training rows support the answers to test inputs: what would change without them.

    Curvature is built from the recording's slots at the first question and kept beside them.
    """
    import dualform
    from dualform import exports
    from dualform import named as names
    from dualform.terminal import show_influence

    dual = dualform.open(run, names.model(named))
    inputs = exports.read_inputs(test, dual)
    with _progress() as progress:
        chosen = None if not target else target[0] if len(target) == 1 else target
        found = dual.influence(inputs, target=chosen, method=method.value, segments=segments, progress=progress)
        frame = (found if layer is None else found[layer]).top(top, by=by or None, where=where, lowest=lowest)
    about = {"method": method.value, "segments": found.segments, "moments": found.moments, "layer": layer}
    if as_json:
        _print_json({**about, "estimated": True, "top": frame.to_dicts()})
    else:
        show_influence(Console(), about, frame)


@app.command()
@_one_line_errors
def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="Folder for the Parquet files; made if need be.", show_default=False)],
    queries: Annotated[
        Path | None,
        typer.Option(help="Query vectors of a layer: .npy, .safetensors or .parquet.", show_default=False),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="The layer that the query vectors belong to.", show_default=False)
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="So many slots for each query.", show_default="10")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The attention weights of all slots.")] = False,
    where: Annotated[
        str | None, typer.Option(help='Only these rows and slots: SQL, e.g. "label = 7 and step >= 100".')
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the rows, and the attention weights for given query vectors, to Parquet."""
    if (queries is None) != (layer is None):
        given, missing = ("--layer", "--queries") if queries is None else ("--queries", "--layer")
        raise typer.BadParameter(f"{given} needs {missing} beside it.", param_hint=missing)
    if queries is None and (top is not None or everything):
        raise typer.BadParameter("--top and --all need --queries FILE and --layer NAME.", param_hint="--queries")
    if top is not None and everything:
        raise typer.BadParameter("give one of --top and --all.", param_hint="--top")

    import dualform
    from dualform import exports

    dual = dualform.open(run)
    vectors = None if queries is None or layer is None else exports.read_queries(queries, layer)
    if to.exists() and not to.is_dir():
        raise typer.BadParameter(f"{to} is a file; expected a folder.", param_hint="--to")
    to.mkdir(parents=True, exist_ok=True)
    with _progress() as progress:
        written = {"rows": exports.write_rows(dual, to, where=where)}
        if vectors is not None and layer is not None:
            if everything:
                found = exports.write_all(dual, layer, vectors, to, where=where, progress=progress)
            else:
                found = exports.write_top(dual, layer, vectors, to, k=top or 10, where=where)
            written["attention"] = found
    if as_json:
        _print_json({name: {"path": str(one.path), "lines": one.lines} for name, one in written.items()})
    else:
        for name, one in written.items():
            print(f"{name}: {one.lines:,} lines in {one.path}")


Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with mnist/, fashion-mnist/, aesop/, wikitext-2/.", show_default="DUALFORM_DATA, cache, download"
    ),
]


@app.command()
@_one_line_errors
def explore(
    run: Run,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    host: Annotated[
        str, typer.Option(help="Another than this machine's own needs the token that is printed.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    data: Data = None,
) -> None:
    """Show a run of the demo or the paper in the browser: where predictions come from, and what happens without some memory."""
    from dualform.explorer.runs import find
    from dualform.explorer.server import Server
    from dualform.explorer.session import Session

    server = Server(Session(find(run, data)), host=host, port=port).start()
    print(f"dualform explorer: {server.url}   (Ctrl-C ends it)", flush=True)
    if browser:
        server.open_browser()
    server.wait()


@app.command()
@_one_line_errors
def report(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to be written.")] = Path("report.html"),
    test: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="The number of a test example; several may be given.", show_default="right and wrong ones"
        ),
    ] = None,
    data: Data = None,
) -> None:
    """Write the explorer's views of some test examples into one file that opens without a server."""
    from dualform.explorer.report import write
    from dualform.explorer.runs import find
    from dualform.explorer.session import Session

    with _progress() as progress:
        written = write(Session(find(run, data)), out, tests=test, progress=progress)
    print(f"{out}: {written.examples} test examples, {written.nbytes / 1e6:.1f} MB")


@app.command()
@_one_line_errors
def mislabelled(
    run: Run,
    top: Annotated[int, typer.Option(min=1, help="So many samples.")] = 20,
    by: Annotated[str, typer.Option(help="The column that makes the samples.")] = "sample_id",
    layer: Annotated[str | None, typer.Option(help="The layer at the output.", show_default="the last")] = None,
    where: Annotated[str | None, typer.Option(help='Only these visits: SQL, e.g. "step >= 100".')] = None,
    summed: Annotated[bool, typer.Option("--sum", help="The loss was a sum over the batch, not a mean.")] = False,
    planted: Annotated[
        str | None, typer.Option(help="A Boolean column that says which labels were flipped: how well are they found?")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank training samples by the mean size of their error signals at the output: wrong labels come first."""
    import dualform
    from dualform.evaluate.flips import mislabel_auc
    from dualform.terminal import show_mislabelled

    dual, reduction = dualform.open(run), "sum" if summed else "mean"
    found = dual.mislabelled(top, by=by, layer=layer, where=where, reduction=reduction)
    area = None if planted is None else mislabel_auc(dual, planted, by=by, layer=layer, reduction=reduction)
    if as_json:
        _print_json({"samples": found.to_dicts()} | ({} if area is None else {"auc": area}))
    else:
        show_mislabelled(Console(), found, area)


@app.command()
@_one_line_errors
def evaluate(
    run: Run,
    study: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A dualform.Study, or a function that gives one: how to train again, and the test examples.",
            show_default="the demo's, for a demo",
        ),
    ] = None,
    subsets: Annotated[int, typer.Option(min=3, help="So many random halves of the samples.")] = 50,
    repeats: Annotated[int, typer.Option(min=1, help="Trainings on each, with fresh seeds.")] = 2,
    fraction: Annotated[float, typer.Option(help="How much of the samples a subset keeps.")] = 0.5,
    view: Annotated[
        list[str] | None, typer.Option(help="Only this view; may be given several times.", show_default="all")
    ] = None,
    leave_out: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also: train without the so many samples that support a test example most.", show_default=False
        ),
    ] = None,
    tail_patch: Annotated[
        int | None,
        typer.Option(min=1, help="Language runs, also: one step on the so many best passages.", show_default=False),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that train, one thread each.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder that keeps the trainings.", show_default="RUN-retrained")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the subsets.")] = 0,
    as_json: Json = False,
) -> None:
    """Train again on random halves of the data: which of the run's answers foretell the outcome?

    What an interrupted evaluation has trained is not trained again.
    """
    from dualform.evaluate.evaluation import prepare
    from dualform.evaluate.fewer import leave_few_out
    from dualform.evaluate.tailpatch import tail_patch as patched
    from dualform.terminal import show_also, show_evaluation

    asked = prepare(
        run,
        _study(run, study),
        out=out,
        subsets=subsets,
        repeats=repeats,
        fraction=fraction,
        views=view,
        workers=workers,
        seed=seed,
    )
    _announce(asked)
    also: dict[str, pl.DataFrame] = {}
    with _progress() as progress:
        found = asked.run(progress)
        if leave_out is not None:
            few = leave_few_out(
                asked.dual,
                asked.study,
                leave_out,
                out=asked.retrained.folder,
                repeats=repeats,
                views=view,
                workers=workers,
                progress=progress,
            )
            _announce(few)
            also["leave_out"] = few.run(progress)
        if tail_patch is not None:
            also["tail_patch"] = patched(asked.dual, asked.study, tail_patch, views=view, progress=progress)
    if as_json:
        _print_json(found.to_dict() | {name: frame.to_dicts() for name, frame in also.items()})
    else:
        show_evaluation(Console(), found)
        for name, frame in also.items():
            show_also(Console(), name, frame, leave_out if name == "leave_out" else tail_patch)


def _announce(asked: Evaluator | FewOut) -> None:
    left = asked.estimate()
    print(
        f"{left.trainings} trainings to do, about {left.seconds / 60:.1f} min; they are kept in {asked.retrained.folder}",
        file=sys.stderr,
    )


def _study(run: Path, named: str | None) -> dualform.Study:
    """The study that a user names, or that of a demo."""
    from dualform.demo import SETTINGS
    from dualform.demo import study as of_demo
    from dualform.evaluate.study import find

    if named is not None:
        return find(named)
    if (run / SETTINGS).exists():
        return of_demo(run)
    raise typer.BadParameter(
        "how is this run trained again? Name a dualform.Study, or a function that gives one: --study my_module:my_study.",
        param_hint="--study",
    )


@app.command()
@_one_line_errors
def passages(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A recorded language model, with its text beside it.", show_default=False),
    ],
    prompt: Annotated[str, typer.Option(help="Its last token is the query; \\n ends a line.", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="So many passages.")] = 10,
    where: Annotated[
        str | None,
        typer.Option(help="Only these: SQL over text_position, token and title, or over the recording's columns."),
    ] = None,
    part: Annotated[KeyPart, typer.Option(help="Which part of keys and query is compared.")] = KeyPart.both,
    gate: Annotated[
        Gate | None,
        typer.Option(
            help="Contributions to the next token's logit through this gate of the LSTM, instead of attention."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Contributions to the logit of this next token.", show_default="the most probable"),
    ] = None,
    absolute: Annotated[
        bool, typer.Option("--absolute", help="Sums of sizes, as the authors' code; needs slots.")
    ] = False,
    mean: Annotated[
        bool, typer.Option("--mean", help="The mean over a position's visits: they differ by one within an epoch.")
    ] = False,
    slots: Annotated[
        bool, typer.Option("--slots", help="Single slots instead of sums over a position's visits.")
    ] = False,
    width: Annotated[int, typer.Option(min=0, help="Characters shown on each side of the token.")] = 60,
    as_json: Json = False,
) -> None:
    """Show the training passages that a recorded language model reads from after a prompt."""
    from dualform.paper.language.asking import Recorded
    from dualform.paper.language.showing import show

    found = Recorded(run).ask(
        prompt.replace("\\n", "\n"),
        top=top,
        where=where,
        part=part.value,
        gate=None if gate is None else gate.value,
        target=target,
        absolute=absolute,
        mean=mean,
        slots=slots,
        width=width,
    )
    if as_json:
        _print_json(found.to_dict())
    else:
        show(Console(), found)


@app.command()
@_one_line_errors
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
    with _progress() as progress:
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
        _print_json({name: str(page) for name, page in pages.items()})
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
        with _progress() as progress:
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
        _print_json({name: str(page) for name, page in pages.items()})
    else:
        for name, page in pages.items():
            print(f"{name}: {page}\n  dualform passages {out / name / RECORDING} --prompt …")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on standard error, gone when the work is done; none where nobody looks."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=1))
