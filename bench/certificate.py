"""How exact: the paper's MNIST run recorded in each type, checked in every way the documents claim.

DUALFORM_DATA=… python bench/certificate.py [--steps 3000] [--dtypes float32,float16,float64]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import nn

import dualform
import mnist


def distances(model: nn.Module, other: nn.Module, start: nn.Module, updates: int) -> dict[str, dict[str, float]]:
    """For each parameter: gap and distance in rounding floors between two networks."""
    found = {}
    mine, theirs, first = ({n: p.detach() for n, p in m.named_parameters()} for m in (model, other, start))
    for name, value in theirs.items():
        distance = float((mine[name] - value).double().norm())
        moved = float((value - first[name]).double().norm())
        floor = torch.finfo(value.dtype).eps / 2 * math.sqrt(updates) * float(value.double().norm())
        found[name] = {"gap": distance / moved, "floors": distance / floor}
    return found


def measure(dtype: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train, record in `dtype`, and check everything."""
    kind = torch.float64 if dtype == "float64" else torch.float32
    images, test_images = TRAIN[0].to(kind), TEST[0].to(kind)
    model = mnist.network(dtype=kind)
    start, middle = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = mnist.optimizer_for(model)
    halfway = steps // 2

    def keep_middle(step: int) -> None:
        if step == halfway:
            middle.load_state_dict(model.state_dict())

    with dualform.record(model, optimizer, folder, dtype=dtype) as recorder:
        mnist.train(
            model,
            optimizer,
            images,
            TRAIN[1],
            steps=steps,
            before=lambda ids, labels: recorder.batch(sample_id=ids, label=labels),
            after=keep_middle,
        )
    dual = dualform.open(folder, model)
    certificate = dual.verify()
    print(f"\n{dtype}: accuracy {mnist.accuracy(model, test_images, TEST[1]):.4f}, {dual.store.nbytes / 1e9:.2f} GB")
    print(certificate)
    everything = dual.masked(only=pl.col("label") >= 0, read="kept")
    half = pl.col("label") < 5
    low, high = dual.masked(only=half, read="kept"), dual.masked(drop=half, read="kept")
    nothing = dual.masked(only=pl.col("label") < 0, read="kept")
    opposite = copy.deepcopy(low)
    with torch.no_grad():
        for name, value in opposite.named_parameters():
            value.add_(dict(high.named_parameters())[name] - dict(nothing.named_parameters())[name])
    parts = dual.contributions(test_images[:100])["4"].parts()
    rest = float((parts["remainder"].abs() / parts["target"].abs()).max())  # type: ignore[arg-type]
    result = {
        "accuracy": mnist.accuracy(model, test_images, TEST[1]),
        "gigabytes": dual.store.nbytes / 1e9,
        "certificate": {row["parameter"]: row for row in certificate.frame.to_dicts()},
        f"at({halfway}).model() against the checkpoint": distances(dual.at(halfway).model(), middle, start, halfway),
        f"until({halfway}) against the checkpoint": distances(
            dual.at(halfway).masked(only=pl.col("label") >= 0, read="kept"), middle, start, halfway
        ),
        "masked(only=everything) against the model": distances(everything, model, start, steps),
        "mask + opposite against the model": distances(opposite, model, start, steps),
        "contributions of the last layer, largest relative remainder": rest,
    }
    for check, numbers in result.items():
        if isinstance(numbers, dict) and check != "certificate":
            print(f"{check}: largest gap {max(v['gap'] for v in numbers.values()):.1e}")
    print(f"contributions: largest relative remainder {rest:.1e}")
    return result


def error_signals(exact: Path, half: Path) -> float:
    """The largest relative error of a slot's error signal in float16, over all slots and layers."""
    worst = 0.0
    one, other = dualform.open(exact).store, dualform.open(half).store
    for layer in one.manifest.layers:
        for a, b in zip(one.chunks(layer.name), _aligned(one, other, layer.name), strict=True):
            truth = a.errors(torch.float64)
            size = truth.norm(dim=1)
            worst = max(worst, float(((b - truth).norm(dim=1) / size.clamp_min(1e-300)).max()))
    return worst


def _aligned(one: Any, other: Any, layer: str) -> Any:
    """The other store's error signals, cut where the first store's chunks end."""
    rest = torch.empty(0, one.layer(layer)[1].d_out, dtype=torch.float64)
    stream = (chunk.errors(torch.float64) for chunk in other.chunks(layer))
    for chunk in one.chunks(layer):
        while len(rest) < chunk.slots:
            rest = torch.cat([rest, next(stream)])
        yield rest[: chunk.slots]
        rest = rest[chunk.slots :]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=mnist.STEPS)
    parser.add_argument("--dtypes", default="float32,float16,float64")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    TRAIN, TEST = mnist.data(), mnist.data("test")
    with tempfile.TemporaryDirectory() as temporary:
        folders = {dtype: Path(temporary) / dtype for dtype in arguments.dtypes.split(",")}
        results = {dtype: measure(dtype, arguments.steps, folder) for dtype, folder in folders.items()}
        if {"float32", "float16"} <= set(folders):
            worst = error_signals(folders["float32"], folders["float16"])
            print(f"\nfloat16: largest relative error of a slot's error signal {worst:.1e}")
            results["float16"]["largest relative error of a slot's error signal"] = worst
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
