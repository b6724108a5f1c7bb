"""The same training on two ranks and on one, with the same batches: what they have recorded must give the same answers."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dualform

CLASSES, FEATURES, SAMPLES, RANKS = 3, 4, 12, 2


@dataclass(frozen=True)
class Case:
    """A training. Rank r of R takes the rows r, r + R, … of each micro-batch."""

    sizes: tuple[int, ...] = (2, 3)
    """How many rows each micro-batch has on each rank, again and again."""
    steps: int = 4
    accumulated: int = 1
    no_sync: bool = False
    optimizer: str = "sgd"
    clip: float = 0.0
    dtype: torch.dtype = torch.float64
    keep: str = "slots"
    chunk_bytes: int = 1 << 20
    seed: int = 0
    wrapper: tuple = ()
    """Settings of DistributedDataParallel, as pairs."""


def samples(case):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(case.dtype)
    return inputs, torch.arange(SAMPLES) % CLASSES


def network(case):
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, CLASSES)).to(case.dtype)


def optimizer_of(case, model):
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(case):
    """Yield for each step its micro-batches: for each rank ids and the numbers of the visits."""
    order = torch.Generator().manual_seed(case.seed + 1)
    visit = 0
    for step in range(case.steps):
        micro_batches = []
        for number in range(case.accumulated):
            size = case.sizes[(step + number) % len(case.sizes)]
            of_ranks = []
            for _ in range(RANKS):
                ids = torch.randint(0, SAMPLES, (size,), generator=order)
                of_ranks.append((ids, torch.arange(visit, visit + size)))
                visit += size
            micro_batches.append(of_ranks)
        yield micro_batches


def step_on(case, model, optimizer):
    if case.clip:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()


def name_rows(recorder, labels, ids, visits):
    recorder.batch(sample_id=ids, label=labels[ids], visit=visits)


def on_two_ranks(rank, case, path, *, steps=None, **settings):
    """Train on a rank. Returns its weights."""
    inputs, labels = samples(case)
    inner = network(case)
    model = DistributedDataParallel(inner, **dict(case.wrapper))
    optimizer = optimizer_of(case, model)
    options = {"keep": case.keep, "chunk_bytes": case.chunk_bytes, **settings}
    with dualform.record(model, optimizer, path, **options) as recorder:
        for micro_batches in batches(case):
            optimizer.zero_grad()
            for number, of_ranks in enumerate(micro_batches):
                ids, visits = of_ranks[rank]
                is_last = number == case.accumulated - 1
                with model.no_sync() if case.no_sync and not is_last else contextlib.nullcontext():
                    name_rows(recorder, labels, ids, visits)
                    F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            step_on(case, model, optimizer)
    return [parameter.detach().clone() for parameter in inner.parameters()]


def on_one_rank(case, path, **settings):
    """Train in one process on the batches of all ranks together. Returns the model."""
    inputs, labels = samples(case)
    model = network(case)
    optimizer = optimizer_of(case, model)
    with dualform.record(model, optimizer, path, keep=case.keep, **settings) as recorder:
        for micro_batches in batches(case):
            optimizer.zero_grad()
            for of_ranks in micro_batches:
                ids = torch.cat([of_rank[0] for of_rank in of_ranks])
                visits = torch.cat([of_rank[1] for of_rank in of_ranks])
                name_rows(recorder, labels, ids, visits)
                F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            step_on(case, model, optimizer)
    return model
