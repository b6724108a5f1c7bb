"""100 test images against all training data: contributions by sample beside Captum's TracInCPFast with 15 checkpoints.

DUALFORM_DATA=… python bench/tracin.py [--samples 60000]

Ours: what each sample's visits added to the logit of the model's answer, of all 3000 steps, exact (it sums to the logit). TracInCPFast: the
sum over checkpoints of ⟨∂loss(test)/∂W, ∂loss(sample)/∂W⟩ in the last layer, an estimate of influence from 15 moments of training.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mnist
import recordings
from measure import Bar, Row, keep

CHECKPOINTS = 15


def load(model: nn.Module, path: Any) -> float:
    model.load_state_dict(torch.load(path, weights_only=True))
    return 3e-3


if __name__ == "__main__":
    from captum.influence import TracInCPFast

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--samples", type=int, default=60_000, help="so many training images for Captum; its time is multiplied"
    )
    arguments = parser.parse_args()
    dual = recordings.recorded("float16")
    images, labels = mnist.data("test")
    images, labels = images[:100], labels[:100]
    train_images, train_labels = mnist.data()
    some = torch.utils.data.TensorDataset(train_images[: arguments.samples], train_labels[: arguments.samples])
    began = time.perf_counter()
    dual.contributions(images)["4"].top(10, by="sample_id")
    first = time.perf_counter() - began
    began = time.perf_counter()
    dual.contributions(images)["4"].top(10, by="sample_id")
    ours = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, paths = dual.model(), []
        for number in range(CHECKPOINTS):  # where they are does not matter for the time
            paths.append(str(Path(folder) / f"{number}.pt"))
            torch.save(model.state_dict(), paths[-1])
        tracin = TracInCPFast(
            model, model.get_submodule("4"), some, paths, checkpoints_load_func=load, loss_fn=nn.CrossEntropyLoss(reduction="sum"), batch_size=1024
        )  # fmt: skip
        began = time.perf_counter()
        tracin.influence((images, labels), k=10)
        theirs = (time.perf_counter() - began) * 60_000 / arguments.samples
    peer = f"Captum TracInCPFast, {CHECKPOINTS} checkpoints"
    keep(
        Row(
            "100 test images against all training data, last layer, top-10 by sample",
            "python bench/tracin.py",
            {"ours": ours, peer: theirs},
            {peer: ours / theirs},
            {peer: "peer"},
            [Bar(peer, 1)],
            1,
            {
                "the first question, seconds": first,
                "Captum saw": arguments.samples,
                "computes": " ".join(str(__doc__).split("Ours: ")[1].split()),
            },
        )
    )
