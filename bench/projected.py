"""How good is influence from projected row gradients, and from truncated ones of equal bytes? A small Transformer on 8 × 8 digits.

    python bench/projected.py [--subsets 60] [--folder runs/projected]

Each sample is 64 tokens, one for each pixel. The truth: trainings on random halves (fresh seeds); LDS is the mean over test images of the rank
correlation between the summed scores of a half and the true margin. Bytes are those of keys, error signals and row gradients, without snapshots.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.layers.keys import RowGradients
from dualform.store.slots import SlotChunk

RESULTS = Path(__file__).parent / "results" / "projected.json"
TRAINED = 500
TESTS = 60
EPOCHS = 10
BATCH = 50
WIDTH = 32
KINDS: dict[str, dict[str, Any]] = {
    "slots": {},
    "rows": {"keep": "rows"},
    "projected 16": {"keep": "projected", "projection": 16},
    "projected 8": {"keep": "projected", "projection": 8},
    "projected 6": {"keep": "projected", "projection": 6},
    "projected 4": {"keep": "projected", "projection": 4},
}
RANKS = {"rank 4": 4, "rank 2": 2, "rank 1": 1}


class Transformer(nn.Module):
    """Two blocks without normalisation between token and class."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Linear(1, WIDTH)
        self.places = nn.Embedding(64, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        places = self.places(torch.arange(64).expand(len(images), -1))
        tokens = self.pixels(images.unsqueeze(-1)) + places
        logits: Tensor = self.head(self.blocks(tokens).mean(1))
        return logits


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train = order[:TRAINED]
    test = order[TRAINED : TRAINED + TESTS]
    return images[train], labels[train], images[test], labels[test]


def training(ids: Tensor, seed: int, recorder_of: Callable[..., Any] | None = None) -> nn.Module:
    images, labels, _, _ = data()
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    recorder = None if recorder_of is None else recorder_of(model, optimizer)
    for _ in range(EPOCHS):
        order = ids[torch.randperm(len(ids))]
        for batch in torch.split(order, BATCH):
            if recorder is not None:
                recorder.batch(sample_id=batch)
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if recorder is not None:
            recorder.seal()  # the weights of each epoch are known, whatever is kept of the slots
    if recorder is not None:
        recorder.close()
    return model.eval()


def truth(count: int, folder: Path) -> tuple[Tensor, Tensor]:
    """Which samples each half has, (halves, samples), and the margins after training on it, (halves, tests)."""
    _, _, images, labels = data()
    kept = torch.stack(
        [torch.randperm(TRAINED, generator=torch.Generator().manual_seed(n))[: TRAINED // 2] for n in range(count)]
    )
    is_kept = torch.zeros(count, TRAINED).scatter_(1, kept, 1.0)
    file = folder / f"margins-{count}.pt"
    if not file.exists():
        margins = []
        for number, ids in enumerate(kept):
            model = training(ids.sort().values, 1000 + number)
            with torch.no_grad():
                margins.append(_margin(model(images), labels))
        torch.save(torch.stack(margins), file)
    return is_kept, torch.load(file)


def _margin(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = F.log_softmax(logits, 1).gather(1, labels[:, None])[:, 0]
    margin: Tensor = log_p - torch.log1p(-log_p.exp().clamp(max=1 - 1e-6))
    return margin


def lds(scores: Tensor, kept: Tensor, margins: Tensor) -> tuple[float, float]:
    """The mean rank correlation over tests, and its standard error. scores (tests, samples)."""
    foretold = kept.double() @ scores.T
    correlations = []
    for one, other in zip(foretold.T, margins.T, strict=True):
        ranks = torch.stack([one.argsort().argsort(), other.argsort().argsort()]).double()
        correlations.append(torch.corrcoef(ranks)[0, 1])
    found = torch.stack(correlations)
    return float(found.mean()), float(found.std() / len(found) ** 0.5)


def influence(path: Path, **asked: Any) -> Tensor:
    """(tests, samples)"""
    _, _, images, labels = data()
    dual = dualform.open(path, Transformer())
    sums = dual.influence(images, target=labels, **asked).sums("sample_id")
    scores = torch.zeros(TESTS, TRAINED, dtype=torch.float64)
    scores[:, sums.values["sample_id"].to_torch()] = sums.totals
    return scores


@contextmanager
def truncated(rank: int) -> Iterator[list[int]]:
    """Row gradients are read as their best approximations of a rank, which also say how many numbers they would take."""
    pairs = SlotChunk.pairs
    numbers: list[int] = []

    def of_low_rank(chunk: SlotChunk, dtype: torch.dtype, low: int, high: int) -> Any:
        keys, errors = pairs(chunk, dtype, low, high)
        if not isinstance(keys, RowGradients) or min(keys.weights.shape[1:]) <= rank:
            return keys, errors
        left, values, right = torch.linalg.svd(keys.weights, full_matrices=False)
        near = (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank]
        _, outputs, width = keys.weights.shape
        numbers.append(len(keys) * (rank * (outputs + width) + keys.biases.shape[1]))
        return RowGradients.of(chunk.layer, torch.cat([near.flatten(1), keys.biases], 1)), errors

    SlotChunk.pairs = of_low_rank  # type: ignore[assignment, method-assign]
    try:
        yield numbers
    finally:
        SlotChunk.pairs = pairs  # type: ignore[method-assign]


def stored_numbers(path: Path, dual: dualform.Dual) -> int:
    """Bytes of keys, error signals and row gradients."""
    total = 0
    for chunk in dual.store.manifest.layers:
        for stored in dual.store.chunks(chunk.name):
            for what in ("keys", "errors", "gradients"):
                name = f"{stored.number}.{what}"
                total += stored.file[name].nbytes if name in stored.file else 0
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subsets", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("runs/projected"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    kept, margins = truth(given.subsets, given.folder)
    found: dict[str, dict[str, float]] = {}
    every = torch.arange(TRAINED)
    for kind, settings in KINDS.items():
        path = given.folder / "run"
        shutil.rmtree(path, ignore_errors=True)
        training(every, 100, lambda model, optimizer: dualform.record(model, optimizer, path, **settings))  # noqa: B023
        dual = dualform.open(path, Transformer())
        value, error = lds(influence(path), kept, margins)
        found[kind] = {"bytes": stored_numbers(path, dual), "lds": value, "standard_error": error}
        print(kind, found[kind], flush=True)
        if kind == "rows":
            _add_ranks(path, found, kept, margins)
    shutil.rmtree(given.folder / "run", ignore_errors=True)
    content = {"subsets": given.subsets, "found": found}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def _add_ranks(path: Path, found: dict[str, dict[str, float]], kept: Tensor, margins: Tensor) -> None:
    """Scores from truncated row gradients, and what these would take. Layers whose rows were not summed stay as they are."""
    segments = 10
    for name, rank in RANKS.items():
        with truncated(rank) as numbers:
            value, error = lds(influence(path, segments=segments), kept, margins)
        # Each row is read once in every pass over the queries
        found[name] = {"numbers_read": float(sum(numbers)), "lds": value, "standard_error": error}
        print(name, found[name], flush=True)


if __name__ == "__main__":
    main()
