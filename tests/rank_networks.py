"""Networks people train, on two ranks: each function runs on one of them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dualform
from dualform.demo import Settings, load
from dualform.demo import network as digits_network
from recorded_networks import CLASSES, NETWORKS, OPTIMIZERS, SAMPLES

ROWS = 3


def dataset(name):
    """Inputs, labels, and the number of each sample; its inputs tell which sample it is."""
    if name == "digits":
        digits = load(Settings())
        return digits.images[:96], digits.labels[:96], torch.arange(96)
    _, entries = NETWORKS[name]
    inputs = entries(SAMPLES, 0)
    labels = torch.arange(SAMPLES) % CLASSES
    return inputs, labels if name == "cnn" else labels[:, None].expand(-1, inputs.shape[1]), torch.arange(SAMPLES)


def make(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "digits":
            return digits_network(Settings(width=16), 0)
        return NETWORKS[name][0]().double()


def train(rank, name, path, *, optimizer="sgd", epochs=2, accumulated=1, autocast=False, wrapper=None, **settings):
    """Train with a DistributedSampler, as anybody would. Returns which samples this rank saw, batch by batch."""
    tensors = TensorDataset(*dataset(name))
    model = make(name)
    if autocast:
        model = model.float()
    parallel = DistributedDataParallel(model, **(wrapper or {}))
    made = OPTIMIZERS[optimizer](parallel.parameters())
    sampler = DistributedSampler(tensors, seed=3)
    seen = []
    with dualform.record(parallel, made, path, **settings) as recorder:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for number, (inputs, labels, ids) in enumerate(DataLoader(tensors, batch_size=ROWS, sampler=sampler)):
                recorder.batch(sample_id=ids, process=rank)
                if autocast:
                    inputs = inputs.float()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = parallel(inputs).float() if autocast else parallel(inputs)
                F.cross_entropy(output.flatten(0, -2), labels.flatten()).backward()
                seen.append(ids.tolist())
                if (number + 1) % accumulated == 0:
                    made.step()
                    made.zero_grad()
                    recorder.log(loss=0.0)
    return seen


class Branches(nn.Module):
    """Rank 1 does not use the second branch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, both=True):
        y = self.first(x)
        return self.head(y + self.second(x) if both else y)


def train_branches(rank, path):
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches().double(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(4):
            ids = torch.arange(3) + 6 * (step % 2) + 3 * rank
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids], both=rank == 0), ids % 3).backward()
            optimizer.step()


def seal_apart(rank, path):
    """Each rank seals after other steps, and stores snapshots there."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 3).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(8):
            ids = (torch.arange(2) + 4 * step + 2 * rank) % 24
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids]), ids % 3).backward()
            optimizer.step()
            if step in ((1, 4), (1, 2, 5))[rank]:
                recorder.seal()
