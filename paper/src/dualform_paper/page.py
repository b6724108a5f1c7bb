"""The page of an experiment: reads like the paper's section, every number from results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualform_paper.data import SOURCES
from dualform_paper.pictures import Picture, paper_name
from dualform_paper.section import percent, table
from dualform_paper.settings import EXPERIMENTS, LAYERS, PRESETS
from dualform_paper.summary import lists_over, over, written
from dualform_paper.table import PAPER

Seeds = Sequence[dict[str, Any]]
TITLES = {
    "single-task": "Single task: MNIST (section 5.2)",
    "joint": "Two tasks at once: MNIST and Fashion-MNIST (section 5.3)",
    "continual": "One task after the other (section 5.4)",
}
NAMES = {name: source.title for name, source in SOURCES.items()}
THEIRS = {
    "single-task": [{"mnist": 97}],
    "joint": [{"mnist": 97, "fashion-mnist": 87}],
    "continual": [{"mnist": 97}, {"mnist": 45, "fashion-mnist": 85}],
}
"""The paper's accuracies after each phase, in percent."""


def page(
    experiment: str,
    command: str,
    seeds: Seeds,
    examples: Sequence[Sequence[Picture]],
    pictures: Mapping[str, Picture],
) -> str:
    """The whole page. examples: the pictures of each; pictures: the others by name."""
    settings = seeds[0]["settings"]
    parts = [f"# {TITLES[experiment]}", _beginning(command, seeds, settings), _accuracies(experiment, seeds)]
    parts.append(_certificate(seeds))
    if experiment == "single-task":
        parts.append(_table_one(seeds, pictures))
    parts.append(_examples(seeds, examples, pictures))
    parts.append(_claims(experiment, seeds, pictures))
    if experiment == "continual":
        parts.append(_forgetting(seeds, pictures))
    parts.append(_beyond(seeds))
    parts.append(_cost(seeds))
    return "\n\n".join(parts) + "\n"


def _beginning(command: str, seeds: Seeds, settings: dict[str, Any]) -> str:
    preset = PRESETS[settings["optimizer"]]
    how = f"SGD, lr {preset.lr:g}" + (f", momentum {preset.momentum:g}" if preset.momentum else ", no momentum")
    how += f", gradient norms clipped at {preset.clip:g}" if preset.clip else ", no clipping"
    phases = ", then ".join(
        f"{phase['steps']} steps on {' and '.join(NAMES[name] for name in phase['datasets'])}"
        for phase in settings["phases"]
    )
    source = (
        "what the authors' code does"
        if settings["optimizer"] == "reference"
        else "what the paper's text says (vanilla SGD)"
    )
    width = settings["width"]
    return (
        f"Made by `{command}`. 784-{width}-{width}-10 with ReLU, batches of {settings['batch']}: {phases}. {how} "
        f"(the `{settings['optimizer']}` preset: {source}). {len(seeds)} seed{'s' if len(seeds) > 1 else ''}; numbers are "
        f"mean ± standard deviation over them, pictures are of seed {settings['seed']}. The paper's layer-0, layer-1 and layer-2 are "
        f"the modules {', '.join(repr(name) for name in LAYERS)}."
    )


def _accuracies(experiment: str, seeds: Seeds) -> str:
    rows = []
    for number, phase in enumerate(seeds[0]["settings"]["phases"]):
        same = tuple(phase["datasets"]) == EXPERIMENTS[experiment][number].datasets  # and not in the reversed order
        for name in seeds[0]["datasets"]:
            theirs = THEIRS[experiment][number].get(name) if same else None
            ours = over(seeds, "trained", "accuracies", number, name)
            told = f"after {' and '.join(NAMES[n] for n in phase['datasets'])}"
            rows.append((told, NAMES[name], written(ours, scale=100), "" if theirs is None else f"{theirs}"))
    return "## Accuracy\n\n" + table(("", "test set", "ours, %", "paper, %"), rows)


def _certificate(seeds: Seeds) -> str:
    rows = [
        (
            str(one["settings"]["seed"]),
            *(f"{line['gap']:.1e}" for line in one["certificate"]),
            "yes" if one["verified"] else "NO",
        )
        for one in seeds
    ]
    names = [line["parameter"] for line in seeds[0]["certificate"]]
    return (
        "## Certificate\n\nEquation 13, checked: for each parameter the distance between its dual form and the trained "
        "weights, relative to how far training has moved it. Stored in float16, which rounds keys and error signals to 11 bits.\n\n"
        + table(("seed", *names, "verified"), rows)
    )


def _table_one(seeds: Seeds, pictures: Mapping[str, Picture]) -> str:
    def cells(*path: str) -> tuple[str, str, str]:
        target, output, right = (
            written(over(seeds, "datasets", "mnist", *path, column))
            for column in ("target_wrong", "output_wrong", "right")
        )
        return target, output, right

    rows: list[tuple[str, ...]] = []
    for layer in LAYERS:
        theirs = (written(PAPER[layer][column]) for column in ("target_wrong", "output_wrong", "right"))
        rows.append((f"{paper_name(layer)}, ours", *cells("table", layer)))
        rows.append((f"{paper_name(layer)}, paper", *theirs))
        if layer == LAYERS[0]:
            rows.append(("layer-0, ours with raw pixels", *cells("raw pixels")))
    rows += [(f"{paper_name(y)}, weight × ‖value‖", *cells("layers", y, "weighed by value")) for y in LAYERS[1:]]
    head = ("", "model wrong: label", "model wrong: answer", "model right: both")
    return (
        "## Table 1\n\nHow often (%) the class with the largest sum of attention weights is the label (Target) or the model's answer "
        "(Output), for all 10,000 test images against all slots.\n\n"
        + table(head, rows)
        + "\n\nLayer-0 depends on how pixels enter: the authors' code normalises them, so products may be negative and sizes are "
        "summed (footnote 8); with raw pixels (footnote 7) nothing is negative. The paper's layers 1 and 2 come from runs whose "
        "text says plain SGD and whose code says momentum and clipping: compare the two presets' pages. The last two rows weigh each "
        "slot by the norm of its value, of which the paper says that it shows no consistent trend.\n\n"
        + _picture(pictures["table 1"])
    )


def _examples(seeds: Seeds, examples: Sequence[Sequence[Picture]], pictures: Mapping[str, Picture]) -> str:
    parts = ["## Single test examples", _picture(pictures["inputs"])]
    for told, shown in zip(seeds[0]["examples"], examples, strict=True):
        rule = told["rule"] + ("" if told["fits the rule"] else " (no test image fits; this is the nearest)")
        parts.append(f"### {NAMES[told['dataset']]}: test image {told['test image']}\n\nRule: {rule}.")
        parts += [_picture(one) for one in shown[:3]]
        parts.append(_matches(told))
        parts.append(_picture(shown[3]))
        parts.append(_split(told))
    return "\n\n".join(parts)


def _matches(told: dict[str, Any]) -> str:
    rows = []
    for layer in LAYERS:
        for n, slot in enumerate(told["layers"][layer]["best slots"]):
            rows.append(
                (
                    paper_name(layer) if n == 0 else "",
                    f"{NAMES[slot['dataset']]} {slot['sample_id']}",
                    str(slot["label"]),
                    str(slot["step"]),
                    str(slot["visits"]),
                    f"{slot['weight']:.1f}",
                )
            )
    return table(("best slots", "training image", "class", "step", "visits of the image", "weight"), rows)


def _split(told: dict[str, Any]) -> str:
    rows = []
    for layer in LAYERS:
        split = told["contributions"][layer]
        slots = sum(sum(part) for part in split["totals"].values())
        rows.append(
            (paper_name(layer), *(f"{x:.4f}" for x in (split["initial"], slots, split["remainder"], split["logit"])))
        )
    return "The answer's logit: initial part + slots + remainder.\n\n" + table(
        ("", "initial part", "all slots", "remainder", "logit"), rows
    )


def _claims(experiment: str, seeds: Seeds, pictures: Mapping[str, Picture]) -> str:
    parts = [
        "## What the paper says in words, on the whole test set\n\nNumbers without a deviation need the best slots of every test image, "
        "and are of the first seed."
        + (
            " A class is a label, whichever the dataset: the network has ten outputs for both."
            if len(seeds[0]["datasets"]) > 1
            else ""
        )
    ]
    for name in seeds[0]["datasets"]:
        where = ("datasets", name, "layers")
        head = ("", *(paper_name(layer) for layer in LAYERS))

        def row(
            words: str, *path: str, scale: float = 100.0, digits: int = 1, where: tuple[str, ...] = where
        ) -> tuple[str, ...]:
            return (words, *(written(over(seeds, *where, layer, *path), digits, scale) for layer in LAYERS))

        rows = [
            row("best slot of another class, answer right (%)", "wrong top", "best slot of another class"),
            row("one of the best 3 of another class (%)", "wrong top", "one of the best three of another class"),
            row("share of the best 10 of another class (%)", "wrong top", "share of the best ten of another class"),
            row("right class's share of all attention (%)", "depth", "share of the right class"),
            row("mean rank of the right class's total", "depth", "rank of the right class", scale=1.0, digits=2),
            row("training images that are in some top 3", "hubs", "images that are in some top 3", scale=1.0, digits=0),
            row(
                "training images that fill half of all top-3 places",
                "hubs",
                "images that fill half of all places",
                scale=1.0,
                digits=0,
            ),
        ]
        if len(seeds[0]["datasets"]) > 1:
            rows.append(row("attention to the other dataset (%)", "cross-task"))
            rows.append(row("the other dataset among the best 10 (%)", "cross-task top"))
        parts.append(f"### {NAMES[name]} test images\n\n" + table(head, rows))
        parts.append(_hubs(seeds, name))
    parts.append(_recency(seeds, pictures))
    return "\n\n".join(parts)


def _hubs(seeds: Seeds, name: str) -> str:
    words = []
    for layer in LAYERS:
        hub = seeds[0]["datasets"][name]["layers"][layer]["hubs"]["most frequent"][0]
        words.append(
            f"in {paper_name(layer)} {NAMES[hub['dataset']]} {hub['sample_id']} (class {hub['label']}), in the top 3 of "
            f"{percent(hub['share of test images'])} of the test images"
        )
    return (
        f"The training image that is most often in the top 3 (seed {seeds[0]['settings']['seed']}): {'; '.join(words)}."
    )


def _recency(seeds: Seeds, pictures: Mapping[str, Picture]) -> str:
    name = next(iter(seeds[0]["datasets"]))
    every, rows = seeds[0]["settings"]["every"], []
    images = "all test images" if every == 1 else f"one in {every} test images"
    for layer in LAYERS:
        cells = [
            written(over(seeds, "datasets", name, "layers", layer, "recency", key, tenth), scale=100)
            for key in ("first", "all", "late")
            for tenth in (0, -1)
        ]
        rows.append((paper_name(layer), *cells))
    head = (
        "",
        "best 10: first tenth",
        "last tenth",
        "best 500: first tenth",
        "last tenth",
        "ranks 251–500: first tenth",
        "last tenth",
    )
    return (
        f"### Are recent slots more important?\n\nThe share (%) of the top slots written in the first and in the last tenth of the "
        f"training, on {images} of {NAMES[name]}; chance gives 10 %.\n\n"
        + table(head, rows)
        + f"\n\n{_when(seeds, name)} In layer-0 all visits of an image weigh the same, and of equal slots the earlier one comes "
        "first: that its best 10 lean to the beginning is this rule, not the network.\n\n"
        + _picture(pictures["recency"])
    )


def _when(seeds: Seeds, name: str) -> str:
    """Which tenth of the training has most of the top slots."""
    words = []
    for layer in LAYERS:
        shares = lists_over(seeds, "datasets", name, "layers", layer, "recency", "all")
        best = max(range(len(shares)), key=lambda n: shares[n])
        words.append(f"{paper_name(layer)}: tenth {best + 1} ({percent(shares[best])})")
    return f"The tenth of the training in which most of the best 500 were written: {'; '.join(words)}."


def _forgetting(seeds: Seeds, pictures: Mapping[str, Picture]) -> str:
    names = list(seeds[0]["datasets"])
    later = seeds[0]["settings"]["phases"][1]["datasets"][0]
    rows = [
        (mask, *(written(over(seeds, "masks", mask, name), 2, 100) for name in names)) for mask in seeds[0]["masks"]
    ]
    apart = [
        (
            line["parameter"],
            *(
                f"{over(seeds, 'given back', n, key)[0]:.1e}"
                for key in ("from the network after the first task", "from that network with its momentum in flight")
            ),
        )
        for n, line in enumerate(seeds[0]["given back"])
    ]
    shares = [
        (
            f"{NAMES[name]}, answered {which}",
            *(
                written(over(seeds, "datasets", name, "layers", layer, "interference", which), scale=100)
                for layer in LAYERS
            ),
        )
        for name in names
        for which in ("right", "wrong")
    ]
    parts = [
        f"## Nothing is forgotten: masking out {NAMES[later]}\n\nTest accuracy (%) when the slots of {NAMES[later]} are masked out in some "
        f"layers. The mask edits memory; it does not retrain.\n\n"
        + table(("masked in", *(NAMES[name] for name in names)), rows),
        _picture(pictures["masks"]),
        "How far the masked network is from the network after the first task, relative to what the first task moved. With momentum, "
        "the first task's last gradients still act in the second phase's first steps, so the mask keeps them: the second column "
        "takes this momentum in flight into account. (The store is float16, which rounds to 11 bits.)\n\n"
        + table(("parameter", "distance", "with momentum in flight"), apart),
    ]
    if "the misread one" in seeds[0]:
        parts.append(_misread(seeds[0]))
    parts.append(
        f"### Interference\n\nThe share (%) of all attention that goes to {NAMES[later]}, which was trained later.\n\n"
        + table(("", *(paper_name(layer) for layer in LAYERS)), shares)
    )
    return "\n\n".join(parts)


def _misread(seed: dict[str, Any]) -> str:
    told = next(one for one in seed["examples"] if one["example"] == "one")
    both = seed["the misread one"]
    answers = {name: max(range(10), key=lambda c: shares[c]) for name, shares in both.items()}
    rows = []
    for layer in LAYERS:
        ranked = sorted(told["layers"][layer]["totals"].items(), key=lambda item: -item[1])[:3]
        named = ((key.rsplit(" ", 1), total) for key, total in ranked)
        rows.append((paper_name(layer), *(f"{NAMES[name]} {label} ({total:.3g})" for (name, label), total in named)))
    words = "; ".join(f"{name}: {answer} with probability {both[name][answer]:.3f}" for name, answer in answers.items())
    return (
        f"### The misread 1\n\nTest image {told['test image']} of MNIST, a 1. {words[0].upper()}{words[1:]}. The classes with the most "
        f"attention, by layer:\n\n" + table(("", "first", "second", "third"), rows)
    )


def _beyond(seeds: Seeds) -> str:
    parts = [
        "## Beyond the paper: contributions instead of attention\n\nTable 1 with the signed contributions of each class's slots to the "
        "logit of the model's answer: exact in layer-2, first order below."
    ]
    for name in seeds[0]["datasets"]:
        rows = []
        for layer in LAYERS:
            for words, path in (("attention", "table"), ("contribution", "contribution votes")):
                cells = (
                    written(over(seeds, "datasets", name, path, layer, column))
                    for column in ("target_wrong", "output_wrong", "right")
                )
                rows.append((f"{paper_name(layer)}, {words}", *cells))
        parts.append(
            f"{NAMES[name]} test images:\n\n"
            + table(("", "model wrong: label", "model wrong: answer", "model right: both"), rows)
        )
        parts.append(_verdict(seeds, name))
    return "\n\n".join(parts)


def _verdict(seeds: Seeds, name: str) -> str:
    agree = [
        over(seeds, "datasets", name, "contribution votes", layer, column)[0]
        for layer in LAYERS
        for column in ("right", "output_wrong")
    ]
    return (
        f"The class that pushes the answer's logit up most is the answer itself, in {min(agree):.1f} % of the images at least, whether the "
        f"answer is right or not. That is no better vote on the truth: a slot pushes its own class's logit up and the others down, so what "
        f"the sum says is what the logit is made of, and where the model is wrong the vote is wrong with it. Attention weights know "
        f"nothing of this sign, which is why their vote wavers."
    )


def _cost(seeds: Seeds) -> str:
    seconds, recorded, bare = (
        over(seeds, *path) for path in (("seconds",), ("trained", "seconds"), ("trained", "bare_seconds"))
    )
    nbytes = over(seeds, "trained", "nbytes")[0]
    return (
        f"## Cost\n\nOne seed: {bare[0]:.0f} s for the bare training (200 steps timed, and multiplied), {recorded[0]:.0f} s with recording, "
        f"{seconds[0]:.0f} s for everything on this page but the drawing: {seconds[0] / max(bare[0], 1e-9):.1f} times the bare training. "
        f"Disk: {nbytes / 1e9:.2f} GB in float16. Times depend on what else the machine does."
    )


def _picture(picture: Picture) -> str:
    return f"![{picture.caption}](figures/{picture.stem}.png)\n\n*{picture.caption}*"
