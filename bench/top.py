"""The best slots: of 128 queries beside FAISS and sgemm, of one query beside a streaming read, of every class.

DUALFORM_DATA=… python bench/top.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import faiss
import torch
from torch import Tensor

import dualform
import recordings
from measure import Bar, compare, stream

COMMAND = "python bench/top.py"
LAYER = "2"
OFTEN = 4
"""So many times more rounds there are of short questions."""


def stored(dual: dualform.Dual, layer: str) -> Iterator[Tensor]:
    """The keys as they are stored, mapped."""
    return (keys.data for _, keys in dual.store.stored(layer, "key"))


def streamed(dual: dualform.Dual, layers: list[str]) -> None:
    """Read every byte of the keys once."""
    for layer in layers:
        for keys in stored(dual, layer):
            stream(keys)


def many(dual: dualform.Dual, images: Tensor, rounds: int) -> None:
    """128 queries."""
    queries = recordings.hidden(dual.model(), images, LAYER)
    keys = dual.layer(LAYER).keys
    faiss.omp_set_num_threads(torch.get_num_threads())
    faiss.cvar.distance_compute_blas_threshold = (
        20  # else 128 queries are multiplied without BLAS, three times as slowly
    )
    index: Any = faiss.IndexFlatIP(keys.shape[1])
    index.add(keys.numpy())
    out, found = torch.empty(len(queries) * 16384), {}

    def ours() -> None:
        found["ours"] = dual.attend(images)[LAYER].best(10)

    def theirs() -> None:
        found["faiss"] = index.search(queries.numpy(), 10)

    def sgemm() -> None:
        for low in range(0, len(keys), 16384):
            some = keys[low : low + 16384]
            torch.mm(queries, some.T, out=out[: len(queries) * len(some)].view(len(queries), len(some)))

    began = time.perf_counter()
    ours()
    first = time.perf_counter() - began
    compare(
        f"top-10 of 128 queries, {len(keys):,} × {keys.shape[1]} keys",
        ours,
        command=COMMAND,
        peers={"FAISS IndexFlatIP": theirs},
        limits={"sgemm": sgemm},
        bars=[Bar("FAISS IndexFlatIP", 1 / 5), Bar("sgemm", 1.3)],
        rounds=rounds,
        notes={"the first question, which makes the sketch, seconds": first},
    )
    scores, slots = found["faiss"]
    same = float((torch.from_numpy(slots) == found["ours"].slots).double().mean())
    off = float((torch.from_numpy(scores) - found["ours"].scores).abs().max() / found["ours"].scores.max())
    print(f"the same slots as FAISS in {100 * same:.2f} % of places, scores within {off:.1e} of the largest")


def one(dual: dualform.Dual, dtype: str, image: Tensor, rounds: int) -> None:
    """A single query, all layers for the best of every class."""
    rounds *= OFTEN
    print(f"{dtype}: the first question reads and checks everything and makes sketches:")
    began = time.perf_counter()
    for layer in dual.layers:
        dual.attend(image)[layer].top(10)
    first = time.perf_counter() - began
    print(f"{first:.1f} s for three layers")
    compare(
        f"top-10 of one query, {dtype}",
        lambda: dual.attend(image)[LAYER].top(10),
        command=COMMAND,
        limits={"streaming read": lambda: streamed(dual, [LAYER])},
        bars=[Bar("streaming read", 1.5)],
        rounds=rounds,
        notes={"the first question of each of three layers, seconds": first},
    )
    compare(
        f"top-500 of every class, one query, three layers, {dtype}",
        lambda: [dual.attend(image)[layer].top(500, per="label") for layer in dual.layers],
        command=COMMAND,
        peers={"single-query top-10": lambda: [dual.attend(image)[layer].top(10) for layer in dual.layers]},
        limits={"streaming read": lambda: streamed(dual, dual.layers)},
        bars=[Bar("single-query top-10", 2)],
        rounds=rounds,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    images = recordings.queries(128)
    exact, half = recordings.recorded("float32"), recordings.recorded("float16")
    many(exact, images, arguments.rounds)
    for dtype, dual in (("float32", exact), ("float16", half)):
        one(dual, dtype, images[:1], arguments.rounds)
    compare(
        "top-10 of one query, float16 beside float32",
        lambda: half.attend(images[:1])[LAYER].top(10),
        command=COMMAND,
        peers={"float32": lambda: exact.attend(images[:1])[LAYER].top(10)},
        bars=[Bar("float32", 1.1)],
        rounds=OFTEN * arguments.rounds,
    )
