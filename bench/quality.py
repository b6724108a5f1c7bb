"""Which answers foretell retraining? The LDS of each view and peer on five runs, planted wrong labels, leave few out, tail-patch.

python bench/quality.py lds --rows digits-sgd,… [--seeds 2] [--views whitened,kernel,…] [--subsets N] [--repeats N]
python bench/quality.py flips | few | patch
python bench/quality.py table

Needs `pip install '.[bench]' ./paper` and DUALFORM_DATA with mnist/, fashion-mnist/ and aesop/. Trainings, recordings and scores are kept in
the folder, and what is there is not made again. `table` prints docs/quality.md's tables from bench/results/quality.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import dualform
import studies
from dualform.errors import NotRecordedError
from dualform.evaluate.fewer import leave_few_out
from dualform.evaluate.flips import mislabel_auc
from dualform.evaluate.lds import Lds, Truth
from dualform.evaluate.ranks import auc
from dualform.evaluate.retrain import Retrained
from dualform.evaluate.scored import chosen
from dualform.evaluate.subsets import Subsets
from dualform.evaluate.tailpatch import tail_patch

RESULTS = Path(__file__).parent / "results" / "quality.json"
VIEWS = "attention,contribution,whitened,kernel,sketch,kronfluence,kronfluence-damped,kronfluence-5,tracin,trak"
RIVALS = ("kronfluence", "kronfluence-5")
"""What the others' scores are divided by."""
FIRST_SEED = 100
"""Of the recorded runs: other seeds than those of the trainings on subsets."""
FLIPS = {"digits-sgd": 100, "fashion-cnn": 60}
"""Epochs until the flipped labels are memorised."""
FLIPPED = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lds", "flips", "few", "patch", "table"])
    parser.add_argument("--rows", default=",".join(studies.SETTINGS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--views", default=VIEWS)
    parser.add_argument("--repeats", type=int, help="trainings on each subset; default: the setting's")
    parser.add_argument("--subsets", type=int, help="how many; default: the setting's")
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "table":
        print(table(json.loads(RESULTS.read_text())))
        return
    made = {"lds": lds, "flips": flips, "few": few, "patch": patch}[given.what](given)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(given.what, {}).update(made)
    results["versions"] = {"dualform": dualform.__version__, "torch": torch.__version__}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def recorded(name: str, seed: int, folder: Path) -> dualform.Dual:
    """The run of a setting with a seed, recorded if it is not there yet."""
    path, model = folder / f"{name}-{seed}", studies.study(name).model
    if not (path / "whole").exists():
        shutil.rmtree(path, ignore_errors=True)
        ids = torch.arange(len(studies.SETTINGS[name].data().inputs))
        studies.run(name, ids, FIRST_SEED + seed, path / "run")
        (path / "whole").touch()
    return dualform.open(path / "run", model)


def lds(given: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name in given.rows.split(","):
        setting, study = studies.SETTINGS[name], studies.study(name)
        count, repeats = given.subsets or setting.subsets, given.repeats or setting.repeats
        ids = torch.arange(len(setting.data().inputs))
        subsets = Subsets(ids, count, repeats)
        flat = Retrained(study, given.folder / "retrained" / name).outcomes(subsets.jobs(), _say)
        truth = Truth(subsets.kept(), subsets.outcomes(flat))
        seeds = range(given.seeds)
        views: dict[str, Any] = {}
        by_view: dict[str, list[Lds]] = {}
        for view in given.views.split(","):
            scores = [_scores(view, name, seed, given.folder) for seed in seeds]
            views[view] = {"seconds": [one["seconds"] for one in scores], "why": scores[0]["why"]}
            if all(one["scores"] is not None for one in scores):
                by_view[view] = [truth.lds(one["scores"]) for one in scores]
                views[view] |= _told(_pooled(by_view[view])) | {"seeds": [one.interval.value for one in by_view[view]]}
        for view, known in by_view.items():
            views[view]["ratios"] = {
                rival: vars(_pooled(known).ratio(_pooled(by_view[rival]))) for rival in RIVALS if rival in by_view
            }
        found[name] = {
            "views": views,
            "ceiling": truth.ceiling(),
            "subsets": count,
            "repeats": repeats,
            "samples": len(ids),
            "examples": truth.outcomes.shape[2],
            "seeds": given.seeds,
        }
        print(name, json.dumps(found[name], indent=1), flush=True)
    return found


def _scores(view: str, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """A view's scores of a recorded run, with the processor's seconds; kept in the folder."""
    path = folder / "scores" / f"{name}-{seed}-{view}.npz"
    if not path.exists():
        dual, study = recorded(name, seed, folder), studies.study(name)
        before, scores, why = time.process_time(), np.zeros(0), ""
        try:
            scores = chosen([view], study)[view](dual, study, None).numpy()
        except NotRecordedError as error:
            why = str(error)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, scores=scores, seconds=time.process_time() - before, why=why)
        print(f"{name}, seed {seed}: {view} in {time.process_time() - before:.1f} s of the processor {why}", flush=True)
    with np.load(path) as kept:
        found = torch.from_numpy(kept["scores"]) if kept["scores"].size else None
        return {"scores": found, "seconds": float(kept["seconds"]), "why": str(kept["why"]) or None}


def _pooled(seeds: list[Lds]) -> Lds:
    """The mean over recorded runs, which are judged by the same subsets and examples."""
    return Lds(
        torch.stack([one.by_example for one in seeds]).mean(0), torch.stack([one.draws for one in seeds]).mean(0)
    )


def _told(one: Lds) -> dict[str, float]:
    interval = one.interval
    return {"lds": interval.value, "low": interval.low, "high": interval.high}


def flips(given: argparse.Namespace) -> dict[str, Any]:
    """Planted wrong labels, memorised: the AUC of mislabelled(), beside the loss in the end."""
    found = {}
    for name, epochs in FLIPS.items():
        if name not in given.rows.split(","):
            continue
        data = studies.SETTINGS[name].data()
        lines = []
        for seed in range(given.seeds):
            draws = torch.Generator().manual_seed(seed)
            flipped = torch.rand(len(data.labels), generator=draws) < FLIPPED
            other = (data.labels + torch.randint(1, data.kinds, data.labels.shape, generator=draws)) % data.kinds
            labels = torch.where(flipped, other, data.labels)
            path = given.folder / f"flips-{name}-{seed}"
            model = studies.run(
                name, torch.arange(len(labels)), FIRST_SEED + seed, path, labels, epochs=epochs, flipped=flipped
            )
            dual = dualform.open(path, model)
            with torch.no_grad():
                logits = model(data.inputs)
            final = F.cross_entropy(logits, labels, reduction="none")
            before = time.process_time()
            area = mislabel_auc(dual, "flipped")
            lines.append(
                {
                    "auc": area,
                    "seconds": time.process_time() - before,
                    "early": mislabel_auc(dual.at(dual.end_step // 10), "flipped"),
                    "final_loss": auc(final, flipped),
                    "memorised": float((logits.argmax(1) == labels)[flipped].double().mean()),
                }
            )
            shutil.rmtree(path)
            print(name, seed, lines[-1], flush=True)
        found[name] = {"epochs": epochs, "flipped": FLIPPED, "seeds": lines}
    return found


def few(given: argparse.Namespace) -> dict[str, Any]:
    """Digits without the 30 samples that support a test example most."""
    name, k = "digits-sgd", 30
    views = ["attention", "contribution", "whitened", "kernel", "kronfluence", "tracin"]
    asked = leave_few_out(
        recorded(name, 0, given.folder),
        studies.study(name),
        k,
        out=given.folder / "retrained" / name,
        examples=15,
        repeats=2,
        views=views,
    )
    found = asked.run(_say).to_dicts()
    print(json.dumps(found, indent=1))
    return {name: {"k": k, "examples": 15, "repeats": 2, "views": found}}


def patch(given: argparse.Namespace) -> dict[str, Any]:
    """Aesop: one step on the ten passages retrieved."""
    name = "aesop-lstm"
    views = ["attention", "contribution", "whitened", "kronfluence"]
    found = tail_patch(recorded(name, 0, given.folder), studies.study(name), 10, lr=0.1, views=views).to_dicts()
    print(json.dumps(found, indent=1))
    return {name: {"k": 10, "lr": 0.1, "views": found}}


def table(results: dict[str, Any]) -> str:
    """docs/quality.md's tables: the LDS with the processor's seconds, and how many times the rivals' it is."""
    rows = {name: results["lds"][name] for name in studies.SETTINGS if name in results["lds"]}
    head = [f"| | {' | '.join(rows)} |", f"|---|{'---|' * len(rows)}"]

    def line(title: str, cells: Iterable[str]) -> str:
        return f"| {title} | {' | '.join(cells)} |"

    def score(row: dict[str, Any], view: str) -> str:
        one = row["views"].get(view, {})
        if "lds" not in one:
            return "–"
        return f"{one['lds']:.3f} ({one['low']:.3f}–{one['high']:.3f})<br>{np.mean(one['seconds']):.1f} s"

    def times(row: dict[str, Any], view: str, rival: str) -> str:
        one = row["views"].get(view, {}).get("ratios", {}).get(rival)
        return f"{one['value']:.2f} ({one['low']:.2f}–{one['high']:.2f})" if one else "–"

    lines = [line(view, (score(row, view) for row in rows.values())) for view in VIEWS.split(",")]
    ceilings = (f"{row['ceiling']:.2f}" if row["ceiling"] else "not measured" for row in rows.values())
    lines.append(line("ceiling set by retraining noise", ceilings))
    lines.append(line("subsets × trainings", (f"{row['subsets']} × {row['repeats']}" for row in rows.values())))
    ratios = [
        line(f"{view} / {rival}", (times(row, view, rival) for row in rows.values()))
        for view, rival in (("whitened", RIVALS[0]), ("kernel", RIVALS[0]), ("kernel", RIVALS[1]))
    ]
    return "\n".join([*head, *lines, "", *head, *ratios, "", *_short(results)])


def _short(results: dict[str, Any]) -> list[str]:
    """Leave few out and tail-patch: a column for each view, the highest first."""
    lines = []
    for what, of in (("few", "fall"), ("patch", "rise")):
        for name, row in results.get(what, {}).items():
            views = sorted(row["views"], key=lambda one: -one[of])
            digits = 2 if what == "few" else 4
            lines += [
                f"| {name} | {' | '.join(one['view'] for one in views)} |",
                f"|---|{'---|' * len(views)}",
                f"| {of} | "
                + " | ".join(
                    f"{one[of]:.{digits}f} ({one['low']:.{digits}f}–{one['high']:.{digits}f})" for one in views
                )
                + " |",
                "",
            ]
    return lines


def _say(what: str, done: int, total: int) -> None:
    if done % 10 == 0 or done == total:
        print(f"{what} {done}/{total}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="not recorded, so taken from the snapshot")
    main()
