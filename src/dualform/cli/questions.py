"""Commands that ask: influence, likely wrong labels, passages, and how far answers can be trusted."""

from __future__ import annotations

import sys
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dualform.cli.application import app
from dualform.cli.base import Json, Run, one_line_errors, print_json, progress_bars
from dualform.cli.executors import Executor, closing_dual
from dualform.cli.models import Model, OptionalModel, Tokenizer, find_model, find_tokenizer
from dualform.named import find

if TYPE_CHECKING:
    import polars as pl

    import dualform
    from dualform.evaluate.evaluation import Evaluator
    from dualform.evaluate.fewer import FewOut
    from dualform.language.answers import PromptAnswer
    from dualform.language.documents import RecordedDocuments


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


class SourceMethod(str, Enum):
    """How documents are ranked."""

    influence = "influence"
    contribution = "contribution"


class LossMean(str, Enum):
    """What a loss is a mean over."""

    tokens = "tokens"
    rows = "rows"
    none = "none"


@app.command()
@one_line_errors
def influence(
    run: Run,
    test: Annotated[
        Path, typer.Option(help="Test inputs, an entry each: .npy, .safetensors or .parquet.", show_default=False)
    ],
    named: Model,
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
    segments: Annotated[int, typer.Option(min=1, help="Use at most this many epochs, spread over the run.")] = 15,
    loss_mean: Annotated[
        LossMean | None,
        typer.Option(
            help="What the loss was a mean over; tokens: the positions that have a loss.",
            show_default="tokens, or what collect() was told",
        ),
    ] = None,
    executor: Executor = None,
    as_json: Json = False,
) -> None:
    """Estimate which training rows support the answers to test inputs: what would change without them.

    Curvature is built from the recording's slots at the first question and kept beside them.
    """
    from dualform import exports
    from dualform.terminal import show_influence

    with closing_dual(run, named, executor) as dual, progress_bars() as progress:
        inputs = exports.read_inputs(test, dual)
        chosen = None if not target else target[0] if len(target) == 1 else target
        found = dual.influence(
            inputs,
            target=chosen,
            method=method.value,
            segments=segments,
            loss_mean=None if loss_mean is None else loss_mean.value,
            progress=progress,
        )
        frame = (found if layer is None else found[layer]).top(top, by=by or None, where=where, lowest=lowest)
    about = {"method": method.value, "segments": found.segments, "moments": found.moments, "layer": layer}
    if as_json:
        print_json({**about, "estimated": True, "top": frame.to_dicts()})
    else:
        show_influence(Console(), about, frame)


@app.command()
@one_line_errors
def sources(
    run: Run,
    named: Model,
    prompt: Annotated[str, typer.Option(help="What the model is given; \\n ends a line.", show_default=False)],
    completion: Annotated[
        str | None,
        typer.Option(help="What it goes on with, blank before it included.", show_default="the likeliest next token"),
    ] = None,
    tokenizer: Tokenizer = None,
    top: Annotated[int, typer.Option(min=1, help="So many documents.")] = 10,
    by: Annotated[str, typer.Option(help="The column that names documents.")] = "sample_id",
    method: Annotated[
        SourceMethod,
        typer.Option(help="influence: what would change without a document, estimated; contribution: what it wrote."),
    ] = SourceMethod.influence,
    layer: Annotated[
        list[str] | None, typer.Option(help="Of these layers alone, names or globs.", show_default="all, summed")
    ] = None,
    where: Annotated[str | None, typer.Option(help='Only these rows: SQL, e.g. "step >= 100".')] = None,
    lowest: Annotated[bool, typer.Option("--lowest", help="What speaks against the completion most.")] = False,
    segments: Annotated[int, typer.Option(min=1, help="Use at most this many epochs, spread over the run.")] = 15,
    loss_mean: Annotated[
        LossMean | None,
        typer.Option(
            help="What the loss was a mean over; tokens: the positions that have a loss.",
            show_default="tokens, or what collect() was told",
        ),
    ] = None,
    executor: Executor = None,
    as_json: Json = False,
) -> None:
    """Rank training documents by what a language model's completion of a prompt rests on, in total and token by token."""
    with closing_dual(run, named, executor) as dual, progress_bars() as progress:
        found = dual.sources(
            prompt.replace("\\n", "\n"),
            None if completion is None else completion.replace("\\n", "\n"),
            tokenizer=find_tokenizer(tokenizer, named),
            by=by,
            k=top,
            method=method.value,
            layers=layer,
            where=where,
            lowest=lowest,
            segments=segments,
            loss_mean=None if loss_mean is None else loss_mean.value,
            progress=progress,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        Console().print(found)


@app.command()
@one_line_errors
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

    dual, reduction = dualform.open(run), "sum" if summed else None
    found = dual.mislabelled(top, by=by, layer=layer, where=where, reduction=reduction)
    area = None if planted is None else mislabel_auc(dual, planted, by=by, layer=layer, reduction=reduction)
    if as_json:
        print_json({"samples": found.to_dicts()} | ({} if area is None else {"auc": area}))
    else:
        show_mislabelled(Console(), found, area)


@app.command()
@one_line_errors
def evaluate(
    run: Run,
    study: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A dualform.Study, or a function that gives one: how to train again, and the test examples. The module is "
            "imported, from the current folder too, and the function called: this executes their code.",
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
    if tail_patch is not None:
        import_module("bm25s")  # it is needed after all trainings: say at once if it is missing

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
    with progress_bars() as progress:
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
        print_json(found.to_dict() | {name: frame.to_dicts() for name, frame in also.items()})
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


def _study(run: str, named: str | None) -> dualform.Study:
    """The study that a user names, or that of a demo."""
    import dualform
    from dualform.demo import SETTINGS
    from dualform.demo import study as of_demo
    from dualform.store.files import files_at, read_if_there

    if named is not None:
        return find(named, dualform.Study, "a dualform.Study")
    if read_if_there(files_at(run), SETTINGS) is not None:
        return of_demo(run)
    raise typer.BadParameter(
        "how is this run trained again? Name a dualform.Study, or a function that gives one: --study my_module:my_study.",
        param_hint="--study",
    )


@app.command()
@one_line_errors
def passages(
    run: Annotated[
        str,
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
    named: OptionalModel = None,
    tokenizer: Tokenizer = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="Of a Transformer: this layer.", show_default="the last; contributions: the sum of all layers"
        ),
    ] = None,
    by: Annotated[str, typer.Option(help="Of a Transformer: the column that names documents.")] = "sample_id",
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
    """Show the training passages that a recorded language model reads from after a prompt.

    LSTMs of `dualform paper` are described beside their recording; of a Transformer, name --model and --tokenizer.
    """
    prompt = prompt.replace("\\n", "\n")
    if named is not None:
        if gate is not None or part is not KeyPart.both or mean or slots:
            raise typer.BadParameter("--gate, --part, --mean and --slots are for the LSTMs of dualform paper.")
        _show(
            _documents(run, named, tokenizer, by).ask(
                prompt, top=top, layer=layer, target=target, where=where, absolute=absolute, width=width
            ),
            as_json,
        )
        return

    from dualform.language.from_totals import find_totals

    by_slot = gate is not None or target is not None or absolute or slots
    totals = None if by_slot else find_totals(run, where)
    if totals is not None:
        answer = totals.ask(prompt, top=top, where=where, part=part.value, mean=mean, width=width)
    else:
        from dualform.language.recorded import RecordedLanguageModel

        answer = RecordedLanguageModel(run).ask(
            prompt,
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
    _show(answer, as_json)


def _documents(run: str, model: str, tokenizer: str | None, by: str) -> RecordedDocuments:
    import dualform
    from dualform.language.documents import RecordedDocuments

    return RecordedDocuments(dualform.open(run, find_model(model)), find_tokenizer(tokenizer, model), by)


def _show(answer: PromptAnswer, as_json: bool) -> None:
    if as_json:
        print_json(answer.to_dict())
    else:
        from dualform.language.terminal import show_answer

        show_answer(Console(), answer)
