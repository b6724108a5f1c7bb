"""Commands for a recording: make one, look at it, verify it, total it, export it, show it."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dualform.cli.application import app
from dualform.cli.base import FAILED, Data, Json, Run, one_line_errors, print_json, progress_bars
from dualform.cli.models import Model, OptionalModel, Tokenizer, find_model, find_tokenizer

if TYPE_CHECKING:
    from dualform.explorer.subject import Subject


class Kind(str, Enum):
    """What totals keep of a group."""

    keys = "keys"
    deltas = "deltas"
    both = "both"


@app.command()
@one_line_errors
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the recording and the figure.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Decides the split, the first weights and the order.")] = 0,
    figure: Annotated[bool, typer.Option("--figure/--no-figure", help="Draw sources.png and sources.svg.")] = True,
    as_json: Json = False,
) -> None:
    """Train a digits network with recording, verify it, and show where two of its answers come from."""
    from dualform.demo import Settings, run
    from dualform.terminal import show_demo

    with progress_bars() as progress:
        found = run(out, Settings(seed=seed), progress)
        drawn: list[Path] = []
        if figure:
            from dualform.figures.sources import save

            progress("drawing", 0, 1)
            drawn = save([found.right, found.wrong], out / "sources")
            progress("drawing", 1, 1)
    if as_json:
        print_json({**found.to_dict(), "figures": [str(path) for path in drawn]})
    else:
        show_demo(Console(), found, drawn)
    if not found.certificate.passed:
        raise typer.Exit(FAILED)


@app.command()
@one_line_errors
def estimate(
    named: Model,
    rows: Annotated[
        int, typer.Option(min=1, help="How many rows are trained on, over all epochs.", show_default=False)
    ],
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a model of tokens: how many a row has.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Of other models: the shape of one input, such as 3,32,32.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="How many rows make an update.")] = 1,
    samples: Annotated[
        int | None, typer.Option(min=1, help="How many of the rows are distinct.", show_default="all")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="How slots are stored.", show_default="as parameters are")] = None,
    projection: Annotated[
        int, typer.Option(min=1, help="Of keep=projected: how long keys and error signals are, at most.")
    ] = 64,
    every: Annotated[int, typer.Option(min=1, help="Keep the slots of one step in this many, drawn at random.")] = 1,
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Names or globs of layers; several may be given.", show_default="all that can be recorded"),
    ] = None,
    shapes_only: Annotated[
        bool, typer.Option("--shapes-only", help="Build the model on the meta device: without memory for its weights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say how much disk and memory a recording will take, for everything that keep= may be, before training."""
    if (tokens is None) == (shape is None):
        raise typer.BadParameter("give one of --tokens and --shape.", param_hint="--tokens")
    sizes = None if shape is None else _sizes(shape)

    import torch

    import dualform
    from dualform.terminal import show_estimate

    device = torch.device("meta") if shapes_only or (Path(named) / "config.json").is_file() else None
    with device or contextlib.nullcontext():
        model = find_model(named)
    example = None if sizes is None else torch.zeros(1, *sizes, device=device)
    found = dualform.estimate(
        model,
        example,
        rows=rows,
        positions=tokens,
        batch=batch,
        samples=samples,
        dtype=dtype,
        projection=projection,
        every=every,
        layers=layers,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        show_estimate(Console(), found)


def _sizes(shape: str) -> list[int]:
    """Read a shape as a user writes it: 3,32,32."""
    parts = shape.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{shape!r}: expected whole numbers, such as 3,32,32.", param_hint="--shape")
    return [int(part) for part in parts]


@app.command()
@one_line_errors
def info(run: Run, as_json: Json = False) -> None:
    """Say what a recording holds."""
    import dualform
    from dualform.terminal import show_info

    found = dualform.open(run).info()
    if as_json:
        print_json(found)
    else:
        show_info(Console(), found)


@app.command()
@one_line_errors
def copy(
    run: Run,
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO", help="A folder, or an address: s3://bucket/folder, gs://…, az://….", show_default=False
        ),
    ],
    as_json: Json = False,
) -> None:
    """Copy a recording to an address or into a folder. An interrupted copy goes on where it stopped."""
    import dualform
    from dualform.store.format import size_text

    with progress_bars() as progress:
        found = dualform.copy(run, to, progress=progress)
    if as_json:
        print_json(asdict(found))
    else:
        there = found.files - found.copied
        print(f"{found.location}: {found.copied} files copied ({size_text(found.nbytes)}), {there} were there")


@app.command()
@one_line_errors
def verify(
    run: Run,
    step: Annotated[
        int | None,
        typer.Option(help="Verify the network as it was after this many steps.", show_default="the end"),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Weights that were published: .safetensors, .pt or a folder of Hugging Face. Are they those of this training?",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="So many parameters or segments of training at a time.")] = 1,
    as_json: Json = False,
) -> None:
    """Compare each recorded parameter with its dual form. Exits with 1 unless all of them pass, and are the published ones."""
    import dualform
    from dualform.terminal import show_certificate

    dual = dualform.open(run)
    if step is not None:
        dual = dual.at(step)
    with progress_bars() as progress:
        certificate = dual.verify(checkpoint=checkpoint, workers=workers, progress=progress)
    if as_json:
        print(certificate.to_json())
    else:
        show_certificate(Console(), certificate)
    is_published = certificate.published is None or certificate.published.is_equal
    if not certificate.passed or not is_published:
        raise typer.Exit(FAILED)


@app.command()
@one_line_errors
def explained(
    run: Run,
    first: Annotated[int, typer.Option(help="The number of the earlier checkpoint.")] = 0,
    last: Annotated[int, typer.Option(help="That of the later one; negative numbers count from the end.")] = -1,
    rows: Annotated[bool, typer.Option("--rows/--no-rows", help="Also fit a scale for each row.")] = True,
    as_json: Json = False,
) -> None:
    """Say how much of the movement between two checkpoints the gradients explain that dualform.collect() has stored."""
    import dualform
    from dualform.terminal import show_explained

    with progress_bars() as progress:
        found = dualform.open(run).explained(first, last, rows=rows, progress=progress)
    if as_json:
        about = {"first": found.first, "last": found.last}
        print_json({**about, "parameters": found.frame.to_dicts(), "scales": found.scales.to_dicts()})
    else:
        show_explained(Console(), found)


@app.command()
@one_line_errors
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

    with progress_bars() as progress:
        dualform.build_totals(run, by, kind=kind.value, progress=progress)
    store = dualform.open(run).store
    kept = store.manifest.totals
    assert kept is not None  # just built
    number = [grouping.columns for grouping in kept.groupings].index(tuple(by))
    built = {"by": by, "kind": kept.groupings[number].kind, "groups": store.groups(number).height}
    nbytes = sum(file.size for file in kept.files.values())
    if as_json:
        print_json({**built, "groupings": len(kept.groupings), "bytes": nbytes})
    else:
        show_totals(Console(), built, len(kept.groupings), nbytes)


@app.command()
@one_line_errors
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
    with progress_bars() as progress:
        written = {"rows": exports.write_rows(dual, to, where=where)}
        if vectors is not None and layer is not None:
            if everything:
                found = exports.write_all(dual, layer, vectors, to, where=where, progress=progress)
            else:
                found = exports.write_top(dual, layer, vectors, to, k=top or 10, where=where)
            written["attention"] = found
    if as_json:
        print_json({name: {"path": str(one.path), "lines": one.lines} for name, one in written.items()})
    else:
        for name, one in written.items():
            print(f"{name}: {one.lines:,} lines in {one.path}")


@app.command()
@one_line_errors
def explore(
    run: Run,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    host: Annotated[
        str,
        typer.Option(help="0.0.0.0: other machines can reach it, without encryption, with the token that is printed."),
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    named: OptionalModel = None,
    tokenizer: Tokenizer = None,
    by: Annotated[str, typer.Option(help="With --model: the column that names documents.")] = "sample_id",
    data: Data = None,
) -> None:
    """Show a run in the browser: where predictions come from, and what happens without some memory.

    Runs of the demo and of the paper say what they are; of a Transformer, name --model and --tokenizer.
    """
    from dualform.explorer.server import Server
    from dualform.explorer.session import Session

    server = Server(Session(_subject(run, data, named, tokenizer, by)), host=host, port=port).start()
    server.announce(ends=True)
    if browser:
        server.open_browser()
    server.wait()


@app.command()
@one_line_errors
def report(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to be written.")] = Path("report.html"),
    test: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="The number of a test example; several may be given.", show_default="right and wrong ones"
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Of a language model: a prompt; several may be given.", show_default="one of the text's"),
    ] = None,
    named: OptionalModel = None,
    tokenizer: Tokenizer = None,
    by: Annotated[str, typer.Option(help="With --model: the column that names documents.")] = "sample_id",
    data: Data = None,
) -> None:
    """Write the explorer's views of some test examples or prompts into one file that opens without a server."""
    from dualform.explorer.report import write
    from dualform.explorer.session import Session

    session = Session(_subject(run, data, named, tokenizer, by))
    with progress_bars() as progress:
        written = write(session, out, tests=test, prompts=prompt or (), progress=progress)
    what = "test examples" if session.subject.language is None else "prompts"
    print(f"{out}: {written.examples} {what}, {written.nbytes / 1e6:.1f} MB")


def _subject(run: str, data: Path | None, named: str | None, tokenizer: str | None, by: str) -> Subject:
    """What is explored: a run that says what it is, or a recorded Transformer with its tokenizer."""
    if named is None:
        from dualform.explorer.runs import find

        return find(run, data)

    import dualform
    from dualform.explorer.subject import subject

    return subject(dualform.open(run, find_model(named)), by=by, tokenizer=find_tokenizer(tokenizer, named))
