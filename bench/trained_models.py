"""Attribution of models that are already trained: the LDS of a recording, of five checkpoints, and of the final weights alone.

python bench/trained_models.py lds        # digits; several minutes: 300 trainings, which are kept in the folder
python bench/trained_models.py others     # the CNN and the Transformer of bench/keeps.py, whose results have the recording and the retraining
python bench/trained_models.py explained  # how much of the movement between checkpoints the collected gradients explain
python bench/trained_models.py cost       # time of a pass with and without collecting
python bench/trained_models.py table      # prints docs/trained-models.md's tables from bench/results/trained-models.json

The trainings, test examples and subsets of the digits are those of bench/quality.py, whose results hold kronfluence's LDS on the same. On the others,
kronfluence is asked at the final weights where it is installed: `pip install '.[peers]'`.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualform
import keeps
import quality
import recording_networks
import studies
from dualform.evaluate.lds import Truth
from dualform.evaluate.retrain import Retrained
from dualform.evaluate.scored import chosen
from dualform.evaluate.subsets import Subsets
from dualform.evaluate.views import VIEWS, peers

NAME = "digits-sgd"
RESULTS = Path(__file__).parent / "results" / "trained-models.json"
METHODS = ("whitened", "kernel", "sketch")
SITUATIONS = ("recorded", "five checkpoints", "final weights")
PEERS = {
    "recorded": ("", ""),
    "five checkpoints": ("kronfluence-5", ""),
    "final weights": ("kronfluence", "kronfluence-damped"),
}
"""Views of bench/quality.py that see as much; none where there is none."""
CHECKPOINTS = 5
SEEDS = 2
OTHERS = ("fashion-cnn", "aesop-lora")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lds", "others", "explained", "cost", "table"])
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "table":
        of_quality = json.loads(quality.RESULTS.read_text())
        of_keeps = json.loads(keeps.RESULTS.read_text())
        print(table(json.loads(RESULTS.read_text()), of_quality, of_keeps))
        return
    found = {"lds": lds, "others": others, "explained": explained, "cost": cost}[given.what](given.folder)
    print(json.dumps(found, indent=1))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[given.what] = found
    results["versions"] = {"dualform": dualform.__version__, "torch": torch.__version__}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def lds(folder: Path) -> dict[str, Any]:
    """The LDS of each method in each situation, over two trainings."""
    setting = studies.SETTINGS[NAME]
    study = studies.study(NAME)
    ids = torch.arange(len(setting.data().inputs))
    subsets = Subsets(ids, setting.subsets, setting.repeats)
    flat = Retrained(study, folder / "retrained" / NAME).outcomes(subsets.jobs(), quality._say)
    truth = Truth(subsets.kept(), subsets.outcomes(flat))
    found: dict[str, Any] = {"ceiling": truth.ceiling()}
    for situation in SITUATIONS:
        for method in METHODS:
            by_seed = []
            before = time.process_time()
            for seed in range(SEEDS):
                dual = opened(situation, seed, folder)
                scores = VIEWS[method](dual, study, None)
                by_seed.append(truth.lds(scores))
            seconds = (time.process_time() - before) / SEEDS
            told = quality._told(quality._pooled(by_seed))
            found.setdefault(situation, {})[method] = told | {"seconds": seconds}
            print(situation, method, found[situation][method], flush=True)
    return found


def opened(situation: str, seed: int, folder: Path) -> dualform.Dual:
    """A recorded training, or what is collected at its checkpoints: the recording knows all of them."""
    recorded = quality.recorded(NAME, seed, folder)
    if situation == "recorded":
        return recorded
    count = CHECKPOINTS if situation == "five checkpoints" else 1
    path = folder / f"{NAME}-{seed}-{count}-checkpoints"
    collected(NAME, path, checkpoints_of(recorded, count))
    return dualform.open(path, studies.study(NAME).model)


def checkpoints_of(recorded: dualform.Dual, count: int) -> dict[str, dict[str, Tensor]]:
    """Weights at `count` moments, evenly spaced, the end among them."""
    end = recorded.end_step
    steps = [end * (place + 1) // count for place in range(count)]
    return {f"step {step}": recorded.at(step).model().state_dict() for step in steps}


def collected(name: str, path: Path, checkpoints: dict[str, dict[str, Tensor]]) -> None:
    """Collect the training data of a setting at some checkpoints."""
    setting = studies.SETTINGS[name]
    data = setting.data()
    model = studies.study(name).model
    assert isinstance(model, nn.Module)
    loader = DataLoader(TensorDataset(data.inputs, data.labels), batch_size=setting.batch)
    columns = {"label": 1} if data.labels.dim() == 1 else None
    dualform.collect(model, loader, _loss, path, checkpoints=checkpoints, columns=columns, overwrite=True)


def _loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def others(folder: Path) -> dict[str, Any]:
    """The LDS of "whitened" on the other runs, at five checkpoints and at the final weights, with kronfluence at those if it is installed."""
    found: dict[str, Any] = {}
    for name in OTHERS:
        truth, ceiling = keeps.truth(name, folder)
        study = studies.study(name)
        checkpoints = trained_checkpoints(name)
        found[name] = {"ceiling": ceiling}
        for situation in SITUATIONS[1:]:
            kept = checkpoints if situation == "five checkpoints" else dict([list(checkpoints.items())[-1]])
            path = folder / f"{name}-collected"
            collected(name, path, kept)
            dual = dualform.open(path, study.model)
            views = ["whitened", *([] if situation == "five checkpoints" else installed_peers())]
            found[name][situation] = {}
            for view in views:
                scores = chosen([view], study)[view](dual, study, None)
                found[name][situation][view] = quality._told(truth.lds(scores))
                print(name, situation, view, found[name][situation][view], flush=True)
            shutil.rmtree(path)
    return found


def installed_peers() -> list[str]:
    """The views of kronfluence at final weights, if it is installed."""
    return [name for name in PEERS["final weights"] if peers()[name].installed]


def trained_checkpoints(name: str) -> dict[str, dict[str, Tensor]]:
    """The weights at five moments of the training that bench/keeps.py records first."""
    samples = len(studies.SETTINGS[name].data().inputs)
    setting = studies.SETTINGS[name]
    steps = setting.epochs * -(-samples // setting.batch)
    moments = {steps * (place + 1) // CHECKPOINTS for place in range(CHECKPOINTS)}
    found: dict[str, dict[str, Tensor]] = {}
    count = 0

    def keep(model: nn.Module) -> None:
        nonlocal count
        count += 1
        if count in moments:
            found[f"step {count}"] = copy.deepcopy(model.state_dict())

    studies.run(name, torch.arange(samples), quality.FIRST_SEED, after_step=keep)
    return found


def explained(folder: Path) -> dict[str, Any]:
    """What the gradients at the first weights and at five checkpoints explain of the whole training."""
    recorded = quality.recorded(NAME, 0, folder)
    checkpoints = {"step 0": recorded.at(0).model().state_dict()} | checkpoints_of(recorded, CHECKPOINTS)
    path = folder / f"{NAME}-explained"
    collected(NAME, path, checkpoints)
    dual = dualform.open(path)
    whole = dual.explained()
    last = dual.explained(-2)
    print(whole)
    print(last)
    return {"whole": whole.frame.to_dicts(), "last": last.frame.to_dicts()}


def cost(folder: Path) -> dict[str, Any]:
    """A pass over 20 batches with and without collecting, in turns, in seconds of the processor: the median of three ratios."""
    found = {}
    for name, (make, draw) in recording_networks.NETWORKS.items():
        torch.manual_seed(0)
        model = make().eval()
        batches = [draw() for _ in range(20)]
        ratios = []
        for _ in range(4):
            bare = _seconds(lambda model=model, batches=batches: _plain_pass(model, batches))  # type: ignore[misc]
            collecting = _seconds(
                lambda model=model, batches=batches: dualform.collect(  # type: ignore[misc]
                    model, batches, _flat_loss, folder / "cost", overwrite=True
                )
            )
            ratios.append(collecting / bare)
        found[name.removesuffix(", AdamW")] = sorted(ratios[1:])[1]  # the first warms up
    return found


def _seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def _plain_pass(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    for batch in batches:
        model.zero_grad()
        _flat_loss(model, batch).backward()  # type: ignore[no-untyped-call]


def _flat_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def table(results: dict[str, Any], of_quality: dict[str, Any], of_keeps: dict[str, Any]) -> str:
    """The tables of docs/trained-models.md."""
    heads = [*METHODS, "kronfluence", "kronfluence, other damping"]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    views = of_quality["lds"][NAME]["views"]
    for situation in SITUATIONS:
        cells = [_cell(results["lds"][situation][method]) for method in METHODS]
        peers = [_cell(views[peer]) if peer else "–" for peer in PEERS[situation]]
        lines.append(f"| {situation} | {' | '.join([*cells, *peers])} |")
    lines += ["", *table_of_others(results["others"], of_keeps)]
    for name in ("whole", "last"):
        lines += ["", "| parameter | by first | by last | by all | by rows | chance |", "|---|---|---|---|---|---|"]
        for row in results["explained"][name]:
            cells = [_percent(row[one]) for one in ("by_first", "by_last", "by_all", "by_rows", "chance")]
            lines.append(f"| {row['parameter']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_others(results: dict[str, Any], of_keeps: dict[str, Any]) -> list[str]:
    lines = ["| | | whitened | kronfluence | kronfluence, other damping |", "|---|---|---|---|---|"]
    for name, found in results.items():
        title = keeps.RUNS[name].title
        found = found | {"recorded": of_keeps["runs"][name]["keeps"]["slots"]}
        for situation in SITUATIONS:
            views = ("whitened", *PEERS["final weights"])
            cells = [_cell(found[situation][view]) if view in found[situation] else "–" for view in views]
            lines.append(f"| {title} | {situation} | {' | '.join(cells)} |")
            title = ""
    return lines


def _cell(row: dict[str, float]) -> str:
    return f"{row['lds']:.3f} ({row['low']:.3f}–{row['high']:.3f})"


def _percent(number: float | None) -> str:
    return "–" if number is None else f"{number:.1%}"


if __name__ == "__main__":
    main()
