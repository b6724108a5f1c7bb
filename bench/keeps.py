"""Disk, time and LDS of every `keep` on three runs: an MLP, a CNN, and adapters on a Transformer.

    python bench/keeps.py [truth lds time] [--runs digits-sgd,…] [--keeps slots,…]   # default: all of it, an hour and a half of one core
    python bench/keeps.py table                                                      # prints docs/scale.md's table

Needs `pip install '.[bench,transformers]' ./paper` and DUALFORM_DATA with fashion-mnist/, aesop/ and wikitext-2/. Trainings and scores are kept in the
folder, and what is there is not made again; recordings are deleted. The outcomes of retraining are in bench/results/keeps-truth.json:
delete it to train again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dualform
import quality
import studies
from dualform.errors import NotRecordedError
from dualform.evaluate.lds import Lds, Truth
from dualform.evaluate.ranks import correlation
from dualform.evaluate.retrain import Retrained
from dualform.evaluate.subsets import Subsets
from dualform.evaluate.views import VIEWS
from dualform.store.format import size_text

RESULTS = Path(__file__).parent / "results" / "keeps.json"
TRUTHS = RESULTS.with_name("keeps-truth.json")


@dataclass(frozen=True)
class Run:
    """How much is measured of a setting of studies.py."""

    title: str
    subsets: int
    repeats: int
    """Trainings on each subset."""
    seeds: int
    """Recorded trainings that are judged by them."""
    rounds: int
    """Bare and recorded trainings in turns, to be timed, …"""
    timed_epochs: int
    """… of this many epochs each."""
    methods: tuple[str, ...] = ("whitened",)
    """Of influence. The kernel does not fit rows with many labels, and was left out for the CNN to save time."""


RUNS = {
    "digits-sgd": Run(
        "digits, MLP", subsets=100, repeats=3, seeds=2, rounds=10, timed_epochs=15, methods=("whitened", "kernel")
    ),
    "fashion-cnn": Run("Fashion, CNN", subsets=60, repeats=2, seeds=1, rounds=3, timed_epochs=4),
    "aesop-lora": Run("Aesop, Transformer with LoRA", subsets=50, repeats=2, seeds=1, rounds=3, timed_epochs=1),
}
PROJECTIONS = (8, 16, 32, 64)
KEEPS: dict[str, dict[str, Any]] = {
    "slots": {},
    "rows": {"keep": "rows"},
    **{f"projected-{size}": {"keep": "projected", "projection": size} for size in PROJECTIONS},
    "projected-16-float16": {"keep": "projected", "projection": 16, "dtype": "float16"},
    "keys": {"keep": "keys"},
    "totals": {"keep": "totals", "totals": ["tenth"]},
}
"""Arguments of `dualform.record`, by the name of what is kept."""
GROUPS = 10
ANSWERS = {
    "keys": "attention alone",
    "totals": "by group alone",
}
"""What is answered in the place of influence."""


@dataclass(frozen=True)
class Recorded:
    """A recording of a run: one seed, one keep."""

    run: str
    keep: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """The name of the files that keep what was found."""
        return f"{self.run}-{self.seed}-{self.keep}"

    def found(self) -> dict[str, Any]:
        """Sizes and questions' scores, from the folder if they are there."""
        path = self.folder / "found" / f"{self.name}.npz"
        if not path.exists():
            found = self._measure()
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **found)
            print(f"{self.name}: {size_text(found['chunks'])} of chunks", flush=True)
        with np.load(path) as kept:
            return dict(kept)

    def _measure(self) -> dict[str, Any]:
        store = self.folder / f"{self.name}-store"
        model = _train(self.run, self.keep, self.seed, store)
        files = [file for file in store.rglob("*") if file.is_file()]
        found: dict[str, Any] = {
            "disk": sum(file.stat().st_size for file in files),
            "chunks": sum(file.stat().st_size for file in files if file.parent.name.startswith("chunk-")),
        }
        study = studies.study(self.run)
        dual = dualform.open(store, model)
        for method in RUNS[self.run].methods:
            before = time.process_time()
            try:
                found[method] = VIEWS[method](dual, study, None).numpy()
            except NotRecordedError as error:
                found[f"{method} why"] = str(error)
            found[f"{method} seconds"] = time.process_time() - before
        shutil.rmtree(store)
        return found


def _train(run: str, keep: str, seed: int, store: Path | None, epochs: int | None = None) -> nn.Module:
    """The model of a run, recorded into a folder if one is given."""
    ids = torch.arange(len(studies.SETTINGS[run].data().inputs))
    settings = KEEPS[keep]
    return studies.run(
        run, ids, quality.FIRST_SEED + seed, store, epochs=epochs, settings=settings, tenth=groups_of(run)
    )


def times(run: str, keep: str, folder: Path) -> list[float]:
    """Recorded / bare training, in seconds of the processor, in turns; from the folder if they are there."""
    path = folder / "found" / f"{run}-{keep}-times.npy"
    if not path.exists():
        store = folder / f"{run}-{keep}-timed"
        _train(run, keep, 0, store, epochs=1)  # what is imported, pretrained and compiled is no part of a training
        ratios = []
        for _ in range(RUNS[run].rounds):
            began = time.process_time()
            _train(run, keep, 0, None, RUNS[run].timed_epochs)
            bare = time.process_time()
            _train(run, keep, 0, store, RUNS[run].timed_epochs)
            ratios.append((time.process_time() - bare) / (bare - began))
        shutil.rmtree(store)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, ratios)
        print(f"{run}, {keep}: {statistics.median(ratios):.2f} times as long", flush=True)
    found: list[float] = np.load(path).tolist()
    return found


def timed(run: str, keeps: Sequence[str], folder: Path) -> dict[str, Any]:
    """Of each keep: how many times as long as bare training it takes, the median and every round."""
    found = {}
    for keep in keeps:
        factors = times(run, keep, folder)
        found[keep] = {"time": statistics.median(factors), "times": [round(factor, 3) for factor in factors]}
    return {"keeps": found}


def groups_of(run: str) -> torch.Tensor:
    """Ten groups for totals: by label, or by place in the book."""
    labels = studies.SETTINGS[run].data().labels
    if labels.dim() == 1:
        return labels
    return torch.arange(len(labels)) * GROUPS // len(labels)


def truth(run: str, folder: Path) -> tuple[Truth, float]:
    """What training on random halves gave, and the ceiling that its noise sets: from the results, or trained again."""
    truths = json.loads(TRUTHS.read_text()) if TRUTHS.exists() else {}
    ids = torch.arange(len(studies.SETTINGS[run].data().inputs))
    subsets = Subsets(ids, RUNS[run].subsets, RUNS[run].repeats)
    if run not in truths:
        flat = Retrained(studies.study(run), folder / "retrained" / run).outcomes(subsets.jobs(), quality._say)
        whole = Truth(subsets.kept(), subsets.outcomes(flat))
        digits = [[float(f"{number:.4g}") for number in row] for row in whole.outcomes.mean(0).tolist()]
        truths[run] = {"ceiling": whole.ceiling(), "mean_outcomes": digits}
        text = json.dumps(truths, separators=(",", ":"))
        TRUTHS.write_text(text.replace("]", "]\n").replace("\n,", ",\n"))
    outcomes = torch.tensor(truths[run]["mean_outcomes"], dtype=torch.float64)
    return Truth(subsets.kept(), outcomes.unsqueeze(0)), truths[run]["ceiling"]


def lds(run: str, keeps: Sequence[str], folder: Path) -> dict[str, Any]:
    """Of each keep: bytes, and the LDS of each method over two recorded trainings, also as a part of that of the slots."""
    known, ceiling = truth(run, folder)
    setting = studies.SETTINGS[run]
    samples = len(setting.data().inputs)
    found: dict[str, Any] = {
        "ceiling": ceiling,
        "samples": samples,
        "rows": samples * setting.epochs,
        "examples": known.outcomes.shape[2],
        "subsets": RUNS[run].subsets,
        "repeats": RUNS[run].repeats,
        "seeds": RUNS[run].seeds,
    }
    by_keep: dict[str, Any] = {}
    of_slots: dict[str, tuple[Lds, Tensor]] = {}
    for keep in sorted({"slots", *keeps}, key=list(KEEPS).index):
        recordings = [Recorded(run, keep, seed, folder).found() for seed in range(RUNS[run].seeds)]
        by_keep[keep] = {
            "disk": int(recordings[0]["disk"]),
            "chunks": int(recordings[0]["chunks"]),
        }
        for method in RUNS[run].methods:
            seconds = [float(one[f"{method} seconds"]) for one in recordings]
            if method not in recordings[0]:
                by_keep[keep][method] = {"why": str(recordings[0][f"{method} why"])}
                continue
            scores = torch.stack([torch.from_numpy(one[method]) for one in recordings])
            pooled = quality._pooled([known.lds(one) for one in scores])
            exact_lds, exact_scores = of_slots.setdefault(method, (pooled, scores))
            by_keep[keep][method] = quality._told(pooled) | {
                "of_slots": vars(pooled.ratio(exact_lds)),
                "correlation": float(correlation(scores.flatten(0, 1), exact_scores.flatten(0, 1)).mean()),
                "seconds": statistics.mean(seconds),
            }
        print(run, keep, by_keep[keep], flush=True)
    return found | {"keeps": by_keep}


def table(results: dict[str, Any]) -> str:
    """docs/scale.md's table."""
    head = [
        "",
        "`keep=`",
        "bytes a row",
        "slots / this",
        "time",
        "whitened",
        "of that of slots",
        "scores alike",
        "kernel",
    ]
    lines = [f"| {' | '.join(head)} |", "|---|---|--:|--:|--:|---|---|--:|---|"]
    for name, run in RUNS.items():
        if results["runs"].get(name, {}).get("keeps"):
            lines += _lines(run.title, results["runs"][name])
    return "\n".join(lines)


def _lines(title: str, run: dict[str, Any]) -> Iterator[str]:
    slots = run["keeps"]["slots"]["chunks"]
    for keep in KEEPS:
        if keep not in run["keeps"]:
            continue
        one = run["keeps"][keep]
        grows = one["chunks"] > 0
        size = f"{one['chunks'] / run['rows']:,.0f}" if grows else f"{size_text(one['disk'])} in all"
        smaller = f"{slots / one['chunks']:.1f}" if grows else "–"
        factor = f"{one['time']:.2f}" if "time" in one else "–"
        cells = [title, _keep_text(keep), size, smaller, factor]
        if "lds" in one["whitened"]:
            share = one["whitened"]["of_slots"]
            interval = f"{share['value']:.1%} ({share['low']:.1%}–{share['high']:.1%})"
            cells += [_lds_text(one["whitened"]), interval, f"{one['whitened']['correlation']:.3f}"]
        else:
            cells += [ANSWERS.get(keep, "–"), "–", "–"]
        cells.append(_lds_text(one["kernel"]) if "lds" in one.get("kernel", {}) else "–")
        yield f"| {' | '.join(cells)} |"
        title = ""


def _keep_text(keep: str) -> str:
    name, *details = keep.split("-")
    sizes = [f"{one} × {one}" if one.isdigit() else one for one in details]
    return ", ".join([f'`"{name}"`', *sizes])


def _lds_text(one: dict[str, float]) -> str:
    return f"{one['lds']:.3f} ({one['low']:.3f}–{one['high']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["truth", "lds", "time", "table"])
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--keeps", default=",".join(KEEPS))
    parser.add_argument("--folder", type=Path, default=Path("runs/keeps"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    what = given.what or ["truth", "lds", "time", "table"]
    keeps = given.keeps.split(",")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    for run in given.runs.split(","):
        kept = results["runs"].setdefault(run, {"keeps": {}})
        if "truth" in what:
            truth(run, given.folder)
        if "lds" in what:
            _merge(kept, lds(run, keeps, given.folder))
        if "time" in what:
            _merge(kept, timed(run, keeps, given.folder))
        if "lds" in what or "time" in what:
            results["versions"] = {"dualform": dualform.__version__, "torch": torch.__version__}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if "table" in what:
        print(table(results))


def _merge(old: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Take over what is new, and leave what was measured of other keeps."""
    for name, value in new.items():
        if isinstance(value, Mapping) and isinstance(old.get(name), dict):
            _merge(old[name], value)
        else:
            old[name] = value


if __name__ == "__main__":
    main()
