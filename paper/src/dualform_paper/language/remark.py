"""Remark 3.5 from data to page: a small Transformer on Aesop's Fables, and both levels of its retrieval."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import dualform
from dualform.language.terminal import visible
from dualform.language.text import Text
from dualform.progress import Progress, ignore_progress
from dualform_paper.figures import lines, retrieval
from dualform_paper.figures.results import Line, Lines, Retrieval
from dualform_paper.language import corpora
from dualform_paper.language.marking import marked
from dualform_paper.language.queries import chosen, papers
from dualform_paper.language.rankings import Retrieved, rank_of
from dualform_paper.language.training import bits
from dualform_paper.language.transformer import Settings, built, evaluate, train
from dualform_paper.language.two_levels import BEST, Levels, TwoLevels
from dualform_paper.section import percent, table

QUERIES = 40
"""So many tokens of the test text, chosen by the rule, are asked about for the numbers."""
PROVED = 40
"""Steps of the short training of which all slots are kept, to verify."""
SMOOTH = 25
"""Steps over which the loss is averaged in the figure."""


@dataclass(frozen=True)
class Found:
    """What the page says."""

    settings: Settings
    losses: list[float]
    seconds: float
    test_bits: float
    gap: float
    """The largest of the short training's certificate."""
    verified: bool
    levels: list[Levels]
    shown: dict[str, list[Retrieval]]
    """By what is asked: each block."""
    answers: dict[str, list[tuple[str, float]]]
    theirs: dict[str, list[int]]
    """How the last block's first level ranks the passages that the paper's LSTM found."""
    positions: int


def run(
    out: Path,
    *,
    data: Path | None = None,
    settings: Settings = Settings(),  # noqa: B008
    keep: bool = False,
    command: str = "dualform paper transformer",
    progress: Progress = ignore_progress,
) -> Path:
    """Train, verify, ask, and write results.json, figures and index.md into `out`; gives the page. keep: the recording, too."""
    text, recording = corpora.load("aesop", data), out / "recording"
    out.mkdir(parents=True, exist_ok=True)
    proved = _proved(text, settings, out / "proof", progress)
    began = time.perf_counter()
    losses = train(text, settings, recording, progress)
    seconds = time.perf_counter() - began
    found = ask(text, settings, recording, losses, seconds, proved, progress)
    if not keep:
        shutil.rmtree(recording)
    return write(found, out, command)


def ask(
    text: Text,
    settings: Settings,
    recording: Path,
    losses: list[float],
    seconds: float,
    proved: tuple[float, bool],
    progress: Progress = ignore_progress,
) -> Found:
    """Everything that the page says, of a recording."""
    two = TwoLevels(recording, built(text, settings), text, settings.window)
    asked = {text.decode(two.read(one)[0].tolist()): one for one in papers(text) or chosen(text, 1)}
    levels, blocks = list[Levels](), range(settings.blocks)
    for block in blocks:
        progress("asking", block, settings.blocks)
        levels.append(two.measure(chosen(text, QUERIES), block))
    progress("asking", settings.blocks, settings.blocks)
    answers, theirs = dict[str, list[tuple[str, float]]](), dict[str, list[int]]()
    for words, one in asked.items():
        scores = two.first_level(two.levels(one, blocks[-1])[1][-1:], blocks[-1])[0]
        if one.part == "train":
            scores[one.position] = -np.inf
        theirs[words] = [rank_of(scores, position) for position in one.theirs]
        best = two.answer(one).topk(min(3, len(text.vocabulary)))
        answers[words] = [
            (text.vocabulary[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    return Found(
        settings,
        losses,
        seconds,
        bits(evaluate(two.model, text.test.ids, settings.window)),
        *proved,
        levels,
        {words: [two.look(one, block) for block in blocks] for words, one in asked.items()},
        answers,
        theirs,
        len(text.train),
    )


def write(found: Found, out: Path, command: str) -> Path:
    """The page, its figures, and the numbers behind them."""
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    _curve(found, folder / "training")
    last = found.settings.blocks - 1
    for number, (words, blocks) in enumerate(found.shown.items()):
        title = f"Block {last}, asked at the end of “{_shown(words)}”"
        retrieval.save(blocks[last], title, folder / f"query-{number + 1}")
    (out / "results.json").write_text(json.dumps(_plain({"command": command, **asdict(found)}), indent=1))
    (out / "index.md").write_text(page(found, command))
    return out / "index.md"


def page(found: Found, command: str) -> str:
    """In Markdown."""
    s, last = found.settings, found.levels[-1]
    parts = [
        "# Remark 3.5: self-attention as two levels of retrieval",
        f"Made by `{command}`. A Transformer language model on the characters of Aesop's Fables: {s.blocks} blocks of width {s.width} with "
        f"{s.heads} heads, {s.window} characters at a time, distances in the softmax alone (ALiBi); Adam, lr {s.lr:g}, gradient norms clipped "
        f"at {s.clip:g}, {s.steps} steps of {s.batch} windows in {found.seconds / 60:.0f} min with recording (times depend on what else the machine does). Loss "
        f"{bits(found.losses[-1]):.2f} bits a character in the last step; {found.test_bits:.2f} on the test text.",
        "![Loss while training](figures/training.png)",
        "## The two levels\n\nThe projections of a token's vector x to query, key and value are linear layers, so each has its dual form, "
        "W x = W̃₀ x + Σ (k · x) v over all slots of training: the **first level** reads from the training text. A head then adds up values "
        "with the shares α of its softmax: the **second level** reads from the prompt. Since Σ α W x = W̃₀ x̄ + Σ (k · x̄) v with x̄ = Σ α x, "
        "both together are again attention over the training text, with the mixture x̄ as its query. Queries, keys and values are projected "
        "from the same x, so the first level gives all three the same weights; they differ in what the slots wrote.\n\n"
        "Recorded are sums of keys for each position of the text (of any length of training they take the same room). That the equation "
        f"holds is shown by a short training ({min(PROVED, s.steps)} steps, the same sizes) of which every slot is kept: largest gap of the "
        f"attention's parameters {found.gap:.1e}, {'verified' if found.verified else 'NOT verified'}.",
        _examples(found),
        f"## Over {QUERIES} queries\n\nTokens of the test text chosen by the rule of the other pages. Of the {BEST} positions of the training "
        "text with the most attention, for the token that asks (first level) and for the mixtures of the heads (both levels): how often the same "
        "character stands there, how many characters up to there are the prompt's last ones, and how often the model's answer comes next.\n\n"
        + table(
            ("", "same character", "common ending", "model's answer next"),
            [
                (f"block {one.block}, {name}", *_cells(some))
                for one in found.levels
                for name, some in (("first level", one.asked), ("both levels", one.mixed))
            ],
        )
        + "\n\nThe second level, head by head: entropy of the softmax and how far back it looks.\n\n"
        + table(
            ("", *(f"head {head}" for head in range(s.heads))),
            [
                (f"block {one.block}", *(f"{b:.1f} bits, {d:.1f} back" for b, d in zip(one.bits, one.back, strict=True)))
                for one in found.levels
            ],
        ),
        f"In block 0 a vector is its character's embedding, so the first level knows the character and nothing else ({found.levels[0].asked.ending:.1f} "
        f"characters in common). Above, vectors have taken up what came before: in block {last.block} the best positions share "
        f"{last.asked.ending:.1f} characters with the prompt, and {percent(last.asked.answer)} of them go on as the model does.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _examples(found: Found) -> str:
    parts, last = list[str](), found.settings.blocks - 1
    for number, (words, blocks) in enumerate(found.shown.items()):
        likely = ", ".join(f"`{visible(token)}` {percent(p)}" for token, p in found.answers[words])
        title = _shown(words)
        parts.append(
            f"## “… {title[-40:]}”\n\nThe model's next character: {likely}.{_theirs(found, words)}\n\n![Both levels of block {last} for the prompt “{title}”]"
            f"(figures/query-{number + 1}.png)\n\n*Above: how each head's softmax shares out its attention over the prompt. Below: the positions of "
            f"the training text with the highest key · query, in the mean over their visits, for the token that asks, for the tokens with the largest "
            f"share in some head, and for each head's mixture.*"
        )
        parts += [_block(block, one) for block, one in enumerate(blocks) if block != last]
    return "\n\n".join(parts)


def _theirs(found: Found, words: str) -> str:
    if not found.theirs[words]:
        return ""
    ranks = ", ".join(f"{rank:,}" for rank in found.theirs[words])
    return (
        f" The passages that the paper's LSTM attends to most for this query have the ranks {ranks} of {found.positions:,} positions in the "
        f"first level of block {found.settings.blocks - 1}."
    )


def _block(block: int, one: Retrieval) -> str:
    """Another block, in words: the best position of each vector."""
    rows = [
        (reading.name, marked(spot.before[-30:], spot.token, spot.after[:30]), f"{spot.weight:.0f}")
        for reading in (one.asked, *one.attended.values(), *one.heads)
        for spot in reading.spots[:1]
    ]
    return f"<details><summary>Block {block}: the best position of each</summary>\n\n{table(('', 'training text', 'weight'), rows, 2)}\n\n</details>"


def _shown(words: str) -> str:
    """A prompt on one line; its last character asks."""
    return re.sub(r"\s+", " ", words[:-1]) + visible(words[-1])


def _cells(some: Retrieved) -> tuple[str, str, str]:
    return percent(some.same_token), f"{some.ending:.1f}", percent(some.answer)


def _curve(found: Found, stem: Path) -> None:
    losses = np.array(found.losses)
    width = min(SMOOTH, len(losses))
    smooth = np.convolve(losses, np.ones(width) / width, "valid") / np.log(2)
    steps = np.arange(width, len(losses) + 1)
    panel = Lines("", "step", "bits a character", (Line("training", steps, smooth),))
    lines.save([panel], "Loss while training", stem)


def _proved(text: Text, settings: Settings, folder: Path, progress: Progress) -> tuple[float, bool]:
    """The certificate of a short training whose slots are all kept."""
    train(text, replace(settings, steps=min(PROVED, settings.steps), batch=min(8, settings.batch)), folder, slots=True)
    certificate = dualform.open(folder).verify(progress=progress)
    shutil.rmtree(folder)
    return float(certificate.frame["gap"].max()), certificate.passed  # type: ignore[arg-type]


def _plain(content: Any) -> Any:
    """As JSON has it."""
    if isinstance(content, dict):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    return content.tolist() if isinstance(content, np.ndarray) else content
