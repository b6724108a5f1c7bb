"""Table 1: attention by class of 10,000 test images in three layers, beside the authors' way.

DUALFORM_DATA=… python bench/table1.py [--authors 256] [--rounds 1]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import dualform
import mnist
import recordings
from measure import Bar, compare

COMMAND = "python bench/table1.py"


def authors(dual: dualform.Dual, model: torch.nn.Module, images: Tensor, layers: list[str]) -> None:
    """As their code does it: all keys in memory, a product for each step, sizes, then one mask over all slots for each class."""
    labels = torch.from_numpy(dual.rows["label"].to_numpy().copy())
    for layer in layers:
        queries, keys = recordings.hidden(model, images, layer), KEYS[layer]
        for low in range(0, len(queries), mnist.BATCH):
            some = queries[low : low + mnist.BATCH]
            scores = torch.cat([(some @ step.T).abs() for step in torch.split(keys, mnist.BATCH)], 1)
            torch.stack([scores[:, labels == label].sum(1) for label in range(10)], 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--authors", type=int, default=256, help="so many images are done the authors' way, and multiplied"
    )
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    dual = recordings.recorded("float32")
    images, model = recordings.queries(arguments.images), dual.model()
    KEYS = {layer: dual.layer(layer).keys for layer in dual.layers}
    distinct = torch.cat([keys.clone() for _, keys in dual.store.passing("0", "key", torch.float32)])
    times = arguments.images / arguments.authors

    def ours(layers: list[str]) -> None:
        for layer in layers:
            dual.attend(images)[layer].total("label", absolute=True)

    def sgemm() -> None:
        room = torch.empty(2048, 8192)
        for low in range(0, len(images), 2048):
            for first in range(0, len(distinct), 8192):
                some, keys = images[low : low + 2048], distinct[first : first + 8192]
                torch.mm(some, keys.T, out=room[: len(some)].reshape(-1)[: len(some) * len(keys)].view(len(some), -1))

    for layers, bars in (
        (["2", "4"], [Bar("the authors' way", 1 / 100)]),
        (["0"], [Bar("sgemm of the distinct keys", 1.5)]),
        (dual.layers, [Bar("the authors' way", 1 / 20)]),
    ):
        compare(
            f"Table 1, layers {', '.join(layers)}: {arguments.images:,} queries (the authors' way: {arguments.authors}, multiplied)",
            lambda layers=layers: ours(layers),  # type: ignore[misc]
            command=COMMAND,
            peers={}
            if layers == ["0"]
            else {"the authors' way": lambda layers=layers: authors(dual, model, images[: arguments.authors], layers)},  # type: ignore[misc]
            limits={"sgemm of the distinct keys": sgemm} if layers == ["0"] else {},
            bars=bars,
            rounds=arguments.rounds,
            times={"the authors' way": times},
        )
