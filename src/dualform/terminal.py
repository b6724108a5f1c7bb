"""Results as they look in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dualform.figures.colours import colour_of
from dualform.figures.results import Explained
from dualform.store.format import INITIAL, SHARED, size_text

KEPT_BY_ROW = ("slots", "rows", "projected", "keys")
"""What an estimate tells, in the order of its lines."""

if TYPE_CHECKING:
    import polars as pl

    from dualform.demo import Demo
    from dualform.dual.certificate import Certificate
    from dualform.dual.published import Published
    from dualform.evaluate.evaluation import Evaluation
    from dualform.query.explained import ExplainedMovement
    from dualform.record.estimate import Estimate


VERDICTS = {"pass": "green", "unknown": "yellow", "gradients": "yellow", "rounded": "yellow"}
"""The colours of verdicts; all others are red."""
NEVER_NULL = ("query", "rank", "influence", "visits", "slot", "step", "backward", "call", "slot_position")
"""The columns of an answer that do not depend on a row."""
FRACTIONS = ("by_first", "by_last", "by_all", "by_rows", "chance")
"""Of a movement, in the order of their columns."""
KEPT = {"keys": "key sums", "deltas": "group deltas", "both": "key sums and group deltas"}
"""What totals keep of a group, in words."""


def show_certificate(console: Console, certificate: Certificate) -> None:
    """One line for each parameter, and the verdict."""
    title = f"Certificate after step {certificate.step:,}, against {certificate.compared_with}"
    table = _table(title, "parameter", ">gap", ">distance", ">floor", ">movement", "verdict")
    for row in certificate.frame.to_dicts():
        table.add_row(
            escape(row["parameter"]),
            *(f"{row[name]:.1e}" for name in ("gap", "distance", "floor")),
            f"{row['movement']:.3g}",
            Text(f"{row['verdict']}: {row['reason']}", style=VERDICTS.get(row["verdict"], "bold red")),
        )
    console.print(table)
    verdicts = certificate.frame["verdict"]
    equal = (verdicts == "pass").sum()
    if certificate.failed:
        console.print(Text(f"Not verified: {', '.join(certificate.failed)}", style="bold red"))
    elif equal == certificate.frame.height:
        console.print(Text(f"All {equal} parameters equal their dual: initial part + what the slots wrote."))
    elif (verdicts == "gradients").all():
        console.print(Text("The slots explain every gradient. There is no sum to compare with the weights."))
    else:
        console.print(
            Text(f"{equal} of {certificate.frame.height} parameters equal their dual; see the verdicts of the others.")
        )
    if certificate.published is not None:
        _show_published(console, certificate.published)


def _show_published(console: Console, found: Published) -> None:
    """The weights that are not the published ones, or that all are."""
    if found.is_equal:
        console.print(Text(f"All {found.frame.height} weights are those of {found.named}.", style="green"))
        return
    title = f"{len(found.differing)} of {found.frame.height} weights are not those of {found.named}"
    table = _table(title, "parameter", "difference")
    for name, text in found.differences().items():
        table.add_row(escape(name), Text(text, style="yellow"))
    console.print(table)


def show_explained(console: Console, found: ExplainedMovement) -> None:
    """One line for each parameter, and one for all of them."""
    title = f"Movement from {found.first!r} to {found.last!r}, explained by collected gradients"
    table = _table(
        title, "parameter", ">movement", ">by first", ">by last", ">by all", ">residual", ">by rows", ">chance"
    )
    for row in found.frame.to_dicts():
        fractions = {name: "" if row[name] is None else f"{row[name]:.1%}" for name in FRACTIONS}
        table.add_row(
            escape(row["parameter"]),
            f"{row['movement']:.3g}",
            *(fractions[name] for name in FRACTIONS[:3]),
            f"{row['residual']:.3g}",
            *(fractions[name] for name in FRACTIONS[3:]),
        )
    console.print(table)
    console.print(
        "by first, last, all: of the squared movement, with the best scale for the mean gradient at the first checkpoint, the last, all of\n"
        "them. by rows: with a scale for each row at the first; chance: what that would explain of a random movement.",
        highlight=False,
    )


def show_info(console: Console, info: dict[str, Any]) -> None:
    """What a store holds."""
    about = _table(str(info["path"]), "what", "value", header=False)
    about.add_row("origin", Text(info["origin"], style="yellow" if info["checkpoints"] else ""))
    if info["initial"] != INITIAL:
        about.add_row("began from", escape(info["initial"]))
    for one in info["checkpoints"]:
        rate = "" if one["learning_rate"] is None else f", learning rate {one['learning_rate']:g}"
        about.add_row("checkpoint", escape(f"{one['name']}: batches {one['begin']:,} to {one['end']:,}{rate}"))
    if info["ranks"] > 1:
        about.add_row("ranks", f"{info['ranks']:,}, each with a shard of its own")
    for name in ("steps", "rows", "chunks"):
        about.add_row(name, f"{info[name]:,}")
    about.add_row("disk", size_text(info["bytes"]))
    for name in ("dtype", "keep", "created_by"):
        about.add_row(name.replace("_", " "), escape(str(info[name])))
    whole = info["ended"] == "closed"
    about.add_row("ended", Text(info["ended"], style="" if whole else "yellow"))
    about.add_row("snapshots", "after steps " + ", ".join(f"{step:,}" for step in info["snapshots"]))
    columns = ", ".join(f"{name} ({kind})" for name, kind in info["columns"].items())
    about.add_row("columns", escape(columns or "none"))
    for totals in info["totals"]:
        about.add_row("totals", escape(_totals(totals)))
    for name, why in info["left_out"].items():
        about.add_row("left out", escape(f"{name!r}: {why}"))
    for name, mark in info["inexact"].items():
        about.add_row("inexact", Text(f"{name!r} from step {mark['step']:,} on: {mark['why']}", style="bold red"))
    for name, step in info["not_finite_from"].items():
        about.add_row("not finite", Text(f"the gradient of {name!r} from step {step:,} on", style="bold red"))
    console.print(about)
    layers = _table("Layers", "name", "kind", ">inputs", ">outputs", "parameters", ">slots")
    for layer in info["layers"]:
        layers.add_row(
            escape(layer["name"]) or "(the model itself)",
            layer["kind"],
            f"{layer['d_in']:,}",
            f"{layer['d_out']:,}",
            ", ".join(name.removeprefix(f"{layer['name']}.") for name in layer["parameters"]),
            f"{layer['slots']:,}",
        )
    console.print(layers)


def show_estimate(console: Console, found: Estimate) -> None:
    """What recording will take, by what is kept."""
    title = f"{found.rows:,} rows in {found.steps:,} steps, stored in {found.dtype}"
    table = _table(title, "keep", ">disk a row", ">disk", ">memory, at most")
    for keep in KEPT_BY_ROW:
        sizes = (found.bytes_per_row(keep), found.nbytes(keep), found.memory(keep))
        table.add_row(keep, *(size_text(nbytes) for nbytes in sizes))
    console.print(table)
    layers = _table("Layers", "name", ">slots a row", *(f">{keep}" for keep in KEPT_BY_ROW))
    for layer in found.layers:
        of_layer = [size_text(layer.bytes_per_row[keep]) for keep in KEPT_BY_ROW]
        layers.add_row(escape(layer.name) or "(the model itself)", f"{layer.slots:,.0f}", *of_layer)
    console.print(layers)
    console.print(
        Text(
            f'keep="totals" takes {size_text(found.bytes_per_group)} for each group, whatever the number of rows. Recording takes about '
            f"{found.time_factor:.1f} times as long as bare training (rough: measured on other networks)."
        ),
        soft_wrap=True,
    )


def show_totals(console: Console, built: dict[str, Any], groupings: int, nbytes: int) -> None:
    """What was built, and the disk that it takes."""
    others = f", with {groupings - 1} other grouping{'s' * (groupings > 2)}" if groupings > 1 else ""
    console.print(Text(f"Totals {_totals(built)}. On disk{others}: {size_text(nbytes)}."), soft_wrap=True)


def show_mislabelled(console: Console, found: pl.DataFrame, auc: float | None) -> None:
    """One line for each sample, most suspicious first."""
    evidence = [name for name in found.columns if name not in ("rank", "said_probability")]
    table = _table(
        "Samples by the mean size of their error signals at the output", ">rank", *(f">{n}" for n in evidence)
    )
    for row in found.to_dicts():
        if row["said"] is not None:
            row["said"] = f"{row['said']} ({row['said_probability']:.2f})"
        cells = (
            f"{row[n]:.2f}" if isinstance(row[n], float) else "" if row[n] is None else str(row[n]) for n in evidence
        )
        table.add_row(str(row["rank"]), *map(escape, cells))
    console.print(table)
    if found["unit"].null_count() < found.height:
        console.print(
            "unit: the output it was trained as, with its mean probability over all visits; said: the likeliest other one;\n"
            "wrong: at how many visits the model's answer was another.",
            highlight=False,
        )
    if auc is not None:
        console.print(Text(f"A planted wrong label ranks before a right one with probability {auc:.4f} (AUC)."))


ALSO = {
    "leave_out": "Trained without the {k} samples that support a test example most: by how much its target falls",
    "tail_patch": "One step on the {k} passages that support a test example most: by how much its target rises",
}
"""The titles of further tests."""
MEANINGS = {
    "attention": "what is looked at",
    "contribution": "what is read, exact",
    "influence": "what would change, estimated",
}
"""What each kind of answer says."""


def show_evaluation(console: Console, found: Evaluation) -> None:
    """One line for each view, the ceiling, and what to make of them."""
    title = f"LDS of {found.examples} test examples: {found.subsets} subsets of {found.fraction:.0%} of {found.samples:,} samples, "
    table = _table(
        f"{title}{found.repeats} trainings each", "view", "what it says", ">LDS", ">95 % interval", ">seconds", ""
    )
    for row in found.frame.to_dicts():
        score = ("", "") if row["lds"] is None else (f"{row['lds']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}")
        what = MEANINGS.get(row["kind"], "what would change: a peer")
        table.add_row(row["view"], what, *score, f"{row['seconds']:.1f}", escape(row["why"] or ""))
    console.print(table)
    noise = "unknown: each subset was trained on once" if found.ceiling is None else f"about {found.ceiling:.3f}"
    console.print(Text(f"What retraining noise allows: {noise}."))
    console.print(
        Text(f"The recorded model and those trained again order the test examples alike: {found.likeness:.3f}.")
    )


def show_also(console: Console, name: str, found: pl.DataFrame, k: int | None) -> None:
    """One line for each view, of a further test."""
    table = _table(ALSO[name].format(k=k), *(column if column == "view" else f">{column}" for column in found.columns))
    for view, *numbers in found.rows():
        table.add_row(view, *(f"{number:.4f}" for number in numbers))
    console.print(table)


def show_influence(console: Console, about: dict[str, Any], frame: pl.DataFrame) -> None:
    """The best rows or groups of each query."""
    count = len(about["segments"])
    title = f"Influence, estimated ({about['method']}, {count} segment{'s' if count > 1 else ''} of training)"
    numbers = {name for name, kind in frame.schema.items() if kind.is_numeric()}
    table = _table(title, *(f">{name}" if name in numbers else name for name in frame.columns))
    own = [name for name in frame.columns if name not in NEVER_NULL]
    for row in frame.iter_rows(named=True):
        nothing = SHARED if all(row[name] is None for name in own) else ""
        table.add_row(*(_cell(value, nothing) for value in row.values()))
    console.print(table)
    console.print(
        "Positive: supports the target. An estimate of what would change without a row; not what the weights contain."
    )


def _cell(value: Any, nothing: str) -> str:
    """A value as text. nothing: what stands for null."""
    if value is None:
        return nothing
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def show_demo(console: Console, demo: Demo, figures: list[Path]) -> None:
    """The certificate, the accuracy, two answers explained, and how to go on."""
    settings = demo.settings
    console.print()
    show_certificate(console, demo.certificate)
    console.print(
        f"\nTrained on {settings.train_images:,} digits for {demo.steps:,} steps (SGD, momentum "
        f"{settings.momentum:g}, gradients clipped at norm {settings.clip_norm:g}), recorded in "
        f"{size_text(demo.nbytes)}. "
        f"[bold]Test accuracy {demo.accuracy:.1%}[/].",
        highlight=False,
    )
    for explained in (demo.right, demo.wrong):
        _show_explained(console, explained)
    _show_further(console, demo, figures)


def _show_explained(console: Console, explained: Explained) -> None:
    how = "right" if explained.right else "wrong"
    style = "green" if explained.right else "red"
    console.print()
    console.rule(
        f"[bold {style}]{how}[/]: test digit {explained.sample_id}, true class {explained.label}, "
        f"answered {explained.answer}",
        align="left",
    )
    top = _table("Training digits with the highest attention weight (each at its best visit)", ">#")
    for layer in explained.layers:
        top.add_column(f"layer {escape(layer.layer)}\nweight", justify="right")
        top.add_column("\nstep", justify="right")
        top.add_column("\nlabel", justify="center")
    for rank, sources in enumerate(zip(*(layer.top for layer in explained.layers), strict=True), 1):
        cells: list[str | Text] = []
        for source in sources:
            cells += [f"{source.weight:.1f}", f"{source.step:,}", _label(source.label)]
        top.add_row(str(rank), *cells)
    console.print(top)
    totals = _table("Totals per class of the training digits", "class")
    for layer in explained.layers:
        totals.add_column(f"layer {escape(layer.layer)}\nattention", justify="right")
    for split in explained.splits:
        what = "answer" if split.unit == explained.answer else "truth"
        totals.add_column(f"logit of {split.unit}\n({what})", justify="right")
    none = [""] * len(explained.layers)
    totals.add_row("initial part", *none, *(f"{split.initial:+.4f}" for split in explained.splits))
    for label in range(len(explained.splits[0].parts)):
        attention = (f"{layer.totals[label]:,.0f}" for layer in explained.layers)
        totals.add_row(_label(label), *attention, *(f"{split.parts[label]:+.4f}" for split in explained.splits))
    totals.add_section()
    sums = (f"{sum(layer.totals):,.0f}" for layer in explained.layers)
    totals.add_row("sum", *sums, *(f"{split.total:+.4f}" for split in explained.splits))
    totals.add_row("model's logit", *none, *(f"{split.logit:+.4f}" for split in explained.splits))
    totals.add_row("remainder", *none, *(f"{split.remainder:+.1e}" for split in explained.splits))
    console.print(totals)


def _show_further(console: Console, demo: Demo, figures: list[Path]) -> None:
    console.print()
    console.rule("[bold]How to go on[/]", align="left")
    if figures:
        console.print(f"Figure: {' and '.join(map(str, figures))}", highlight=False, soft_wrap=True)
    width, lost, half = demo.settings.width, demo.wrong.label, demo.steps // 2
    console.print(
        f"""
Commands:
  dualform info {demo.folder}
  dualform verify {demo.folder}
  dualform explore {demo.folder}
  dualform mislabelled {demo.folder}
  dualform evaluate {demo.folder}
  dualform export {demo.folder} --to runs/export --where "label = {lost}"

Python:
  import dualform, polars as pl
  from torch import nn
  model = nn.Sequential(nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, {width}), nn.ReLU(),
                        nn.Linear({width}, 10))   # its weights come from the recording
  dual = dualform.open("{demo.folder}", model)
  dual.masked(drop=pl.col("label") == {lost})   # the network without its memory of {lost}s
  dual.at({half}).model()                        # the network as it was then
  dual.layer("4").keys                     # X of equation 13; .values, .initial_weight
""".rstrip(),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _table(title: str, *columns: str, header: bool = True) -> Table:
    """A table; a column that begins with > is flushed right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", show_header=header, box=box.SIMPLE_HEAD)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left")
    return table


def _totals(grouping: dict[str, Any]) -> str:
    count = grouping["groups"]
    return f"by {' + '.join(grouping['by'])}: {count:,} group{'s' * (count != 1)}, {KEPT[grouping['kind']]}"


def _label(label: int) -> Text:
    return Text(f"■ {label}", style=colour_of(label))
