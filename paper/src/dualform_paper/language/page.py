"""A language experiment in words: what was trained, what recording costs, and what the slots prove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualform.language.terminal import visible
from dualform.language.text import Text
from dualform_paper.language.checks import Checked, Pushed
from dualform_paper.language.marking import escaped, marked
from dualform_paper.language.recording import BOUND, Trained
from dualform_paper.language.settings import Settings
from dualform_paper.language.training import bits, perplexity
from dualform_paper.language.ways import Costs
from dualform_paper.section import Section, table

MEASURES = {"character": ("bits per character", bits), "word": ("perplexity", perplexity)}


def learned(text: Text, settings: Settings, trained: Trained) -> Section:
    """What was trained, and how well it predicts the test text."""
    name, measure = MEASURES[text.unit]
    shape = settings.shape(len(text.vocabulary))
    visits = trained.steps * settings.tokens / len(text.train)
    assert trained.test is not None
    between = f" → Linear {shape.between}" if shape.between else ""
    embeddings = "from N(0, 1)"
    if settings.embedding_range is not None:
        embeddings = f"uniformly within ±{settings.embedding_range:g}"
    decay = f", weight decay {settings.weight_decay:g}" if settings.weight_decay else ""
    share = (
        ""
        if settings.predicted == 1
        else (
            f" In each step the loss is about {settings.predicted:.0%} of these, drawn anew: the LSTM reads every {text.unit}, and "
            f"the output layer, nearly all of the cost with this vocabulary, runs on a part."
        )
    )
    kept = (
        f"{len(text.train):,} positions × {shape.key} numbers × 4 bytes, snapshots and the weights; it would not grow with more steps"
        if trained.keep == "totals"
        else f"all slots in float16; training ends where they would take more than {BOUND / 1e9:.0f} GB"
    )
    said = (
        f"{len(text.train):,} {text.unit}s of training text, {len(text.test):,} of test text, vocabulary {len(text.vocabulary):,}. "
        f"Preset `{settings.preset}`: embedding {shape.embedding}{between} → LSTM {shape.state} → Linear{_dropout(settings)}; embeddings "
        f"initialised {embeddings}; Adam, learning rate {settings.lr:g}{decay}, gradients clipped at norm {settings.clip:g}; "
        f"{settings.batch} × {settings.window} {text.unit}s a step. {_reading(text, settings)} Seed {settings.seed}.{share}\n\n"
        f"After **{trained.steps:,} steps** (each position was read {visits:.1f} times in the mean; {trained.seconds / 60:.0f} minutes "
        f"with recording, {trained.processor / 60:.0f} of processor time): **{measure(trained.test):.2f} {name}** on the whole test text. The "
        f"recording takes {trained.nbytes / 1e9:.2f} GB: {kept}."
    )
    curves = {
        "training text, as it was read": _curve(trained.losses, measure),
        "test text, its first 10,000": _curve(trained.curve, measure),
    }
    data = {
        "steps": trained.steps,
        "test": measure(trained.test),
        "seconds": trained.seconds,
        "processor_seconds": trained.processor,
        "axes": {"x": "step", "y": name, "log_y": text.unit == "word"},
        "curves": curves,
    }
    return Section("What was trained", said, data)


def _dropout(settings: Settings) -> str:
    places = []
    if settings.dropout:
        places.append(f"{settings.dropout:g} of the embeddings")
    if settings.output_dropout:
        places.append(f"{settings.output_dropout:g} of the LSTM's output")
    return f", dropout {' and '.join(places)}" if places else ""


def _reading(text: Text, settings: Settings) -> str:
    """How rows read the text, and what happens to their state."""
    state = f"with probability {settings.forget:g} before a step"
    if settings.forget_together:
        state += ", of all rows at once"
    if not settings.epochs:
        return f"Rows read on past the end of the text; their state is carried on and dropped {state}."
    windows = len(text.train) // settings.window // settings.batch
    read = windows * settings.window * settings.batch
    return (
        f"An epoch has {windows:,} steps and reads the first {read:,} {text.unit}s; the state is carried on and dropped at the start of an "
        f"epoch and {state}."
    )


def _curve(points: Sequence[tuple[int, float]], measure: Any) -> dict[str, list[float]]:
    return {"x": [step for step, _ in points], "y": [measure(nats) for _, nats in points]}


def costs(text: Text, settings: Settings, found: Costs) -> Section:
    """The two ways to record, in one table."""
    one = settings.shape(len(text.vocabulary)).key * 4 * len(text.train)
    rows = [
        [
            "time / bare training (processor)",
            f"{found.ratio('totals'):.2f}",
            f"{found.ratio('slots'):.2f}",
        ],
        [
            "time / bare training (clock)",
            f"{found.ratio('totals', 'seconds'):.2f}",
            f"{found.ratio('slots', 'seconds'):.2f}",
        ],
        ["disk", f"{one / 1e9:.2f} GB, however long", f"{found.slot_bytes / 1e6:.1f} MB a step"],
        ["longest training within 20 GB", "any", f"{found.steps_within_bound:,} steps"],
        ["signed sums per position", "yes", "yes"],
        ["sums of sizes per position, single slots, any column", "no", "yes"],
        ["contributions, certificate, masks", "no", "yes"],
    ]
    said = (
        f"Three copies of the model in turn, a step each, {found.steps} steps: without a recorder, with totals, with all slots in float16 (a "
        f"difference of a few hundredths is noise). "
        f"Measured by `dualform paper`, or `python bench/language.py`. The reference code's way, every key in float16, would "
        f"take more than 100 GB for the paper's number of steps; {BOUND / 1e9:.0f} GB is the bound here.\n\n"
        + table(["", "totals per position", "all slots, float16"], rows)
    )
    data = {way: vars(cost) for way, cost in found.by.items()}
    return Section("Two ways to record", said, {"steps": found.steps, "costs": data})


def proved(checked: Checked) -> Section:
    """What all slots of a short training prove."""
    rows = [
        [f"`{row['parameter']}`", f"{row['gap']:.1e}", f"{row['floor']:.1e}", f"{row['movement']:.3g}", row["verdict"]]
        for row in checked.certificate
    ]
    settings = checked.settings
    said = (
        f"A training of {settings['steps']} steps with {settings['batch']} × {settings['window']} tokens, and all its {checked.slots:,} slots of the LSTM in float32 "
        f"({checked.nbytes / 1e6:.0f} MB). Each parameter of the Adam-trained LSTM equals its initial part + what its slots wrote"
        f"{'' if checked.passed else ', but for those marked'}:\n\n"
        + table(["parameter", "gap", "rounding floor", "movement", "verdict"], rows)
        + f"\n\nKey sums · query and the sum over slots differ by {checked.totals_gap:.1e} of the largest at most. {checked.negative:.0%} of the slots have "
        f"a negative attention weight; of the 30 positions with the largest signed sums, {checked.same_top} are also among the 30 "
        f"with the largest sums of sizes, which the authors' code takes."
    )
    return Section("What the slots prove", said, {"certificate": checked.certificate, "totals_gap": checked.totals_gap})


def split(checked: Checked) -> Section:
    """A next token's logit, shared out among training positions."""
    parts = checked.parts
    said = (
        f"The same short training, with error signals of the output layer kept for one token. After “{escaped(checked.prompt)}”, the logit of "
        f"<b>{escaped(visible(checked.target))}</b> is {parts['target']:.4f} = initial part {parts['initial']:.4f} + slots {parts['slots']:.4f} + remainder "
        f"{parts['remainder']:.0e}. What training positions add to it sums to {checked.by_position:.4f}: it is all of the slots' part. "
        f"A position stands for reading its token and predicting the next one.\n\n"
        + table(
            ["passage", "adds", "visits"],
            [_pushed(one) for one in (*checked.up, *checked.down)],
        )
    )
    return Section(
        "Which positions push a logit", said, {"prompt": checked.prompt, "target": checked.target, "parts": parts}
    )


def _pushed(one: Pushed) -> list[str]:
    passage = one.passage
    return [marked(passage.before, passage.token, passage.after), f"{one.contribution:+.4f}", str(one.visits)]
