"""What goes wrong on one of two ranks, or on both. Each function runs on both ranks."""

import os
import signal
import time
import warnings
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dualform
from dualform.record import ranks as ranks_module
from parallel_training import Case, batches, name_rows, network, on_two_ranks, optimizer_of, samples

SHORT = 2
"""Seconds that ranks wait for each other, where a test waits, too."""
CASE = Case(sizes=(3,), steps=4)


def train(rank, path, *, wrong=None, case=CASE, model=None, optimizer=None, begin=0, **settings):
    """Train on a rank. wrong(rank, step, model, recorder) is called before each update. Returns (model, optimizer)."""
    inputs, labels = samples(case)
    model = DistributedDataParallel(network(case)) if model is None else model
    optimizer = optimizer_of(case, model) if optimizer is None else optimizer
    with dualform.record(model, optimizer, path, **settings) as recorder:
        for step, micro_batches in enumerate(batches(case)):
            if step < begin:
                continue
            [of_ranks] = micro_batches
            ids, visits = of_ranks[rank]
            name_rows(recorder, labels, ids, visits)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            if wrong is not None:
                wrong(rank, step, model, recorder)
            optimizer.step()
    return model, optimizer


def changed_gradient(rank, path, **settings):
    """On rank 1 alone, a gradient is changed."""

    def wrong(rank, step, model, recorder):
        if rank == 1 and step == 2:
            model.module[0].weight.grad[0] *= 2

    train(rank, path, wrong=wrong, **settings)


def clipped_by_value(rank, path):
    """On both."""
    train(rank, path, wrong=lambda rank, step, model, recorder: nn.utils.clip_grad_value_(model.parameters(), 1e-3))


def edited_weight(rank, path):
    """On rank 1 alone, a weight is edited, which that rank sees before it meets the other."""

    def wrong(rank, step, model, recorder):
        if rank == 1 and step == 2:
            with torch.no_grad():
                model.module[0].weight.add_(1)

    train(rank, path, wrong=wrong)


def drifting_weights(rank, path):
    """Rank 1 has another learning rate."""
    model = DistributedDataParallel(network(CASE))
    train(rank, path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)))


def never_averaged(rank, path):
    """All passes are within no_sync()."""
    model = DistributedDataParallel(network(CASE))
    with model.no_sync():
        train(rank, path, model=model)


def uneven_passes(rank, path):
    """Rank 0 makes one backward pass more."""
    inputs, labels = samples(CASE)
    model = DistributedDataParallel(network(CASE))
    optimizer = optimizer_of(CASE, model)
    ids = torch.arange(3)
    with dualform.record(model, optimizer, path) as recorder:
        if rank == 0:
            with model.no_sync():
                recorder.batch(sample_id=ids)
                F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
        recorder.batch(sample_id=ids)
        F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
        optimizer.step()


def compressed(rank, path, hook="fp16_compress_hook", late=False):
    """A communication hook; `late`: registered after record()."""
    model = DistributedDataParallel(network(CASE))

    def register(*_):
        if not getattr(model, "_comm_hooks", []):
            model.register_comm_hook(None, getattr(default_hooks, hook))

    if not late:
        register()
    train(rank, path, model=model, wrong=register if late else None)


def joined(rank, path):
    """Uneven inputs."""
    model = DistributedDataParallel(network(CASE))
    with model.join():
        train(rank, path, model=model)


def refused(rank, path, **settings):
    """Settings that several ranks do not have."""
    train(rank, path, **settings)


def only_rank_0_has_room(rank, path):
    """The shard of rank 1 cannot be written: a file is in its place."""
    if rank == 1:
        path.mkdir(exist_ok=True)
        (path / "rank-1").write_text("mine")
    torch.distributed.barrier()
    train(rank, path)


def killed(rank, path):
    """Rank 1 is killed after its third step; both have sealed two."""

    def wrong(rank, step, model, recorder):
        if step == 2:
            recorder.seal()
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(rank, path, wrong=wrong)


def sealed_and_resumed(rank, path):
    """Two steps, sealed; then the rest in another recording, from the checkpoint."""
    first = Case(sizes=(3,), steps=2)
    model, optimizer = train(rank, path, case=first)
    assert dualform.open(path).end_step == 2
    train(rank, path, model=model, optimizer=optimizer, begin=2, resume=True)


def resumed(rank, path):
    """An earlier recording is gone on with, whatever it is."""
    train(rank, path, resume=True)


def again(rank, path, **settings):
    """A whole training into a folder that may hold one."""
    on_two_ranks(rank, CASE, path, **settings)


def settings_of_ranks(rank, path, *settings):
    """Each rank calls record() with settings of its own."""
    train(rank, path, **settings[rank])


def only_rank_0_records(rank, path):
    """Rank 1 does not call record(), and ends later than rank 0 has given up. Returns what rank 0 says meanwhile."""
    ranks_module.WAITS_IN_SILENCE = 0.1
    group = torch.distributed.new_group(timeout=timedelta(seconds=SHORT))
    model = DistributedDataParallel(network(CASE), process_group=group)
    if rank == 1:
        time.sleep(3 * SHORT)
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dualform.record(model, optimizer_of(CASE, model), path)
        except dualform.errors.RecordingError as error:
            return [str(error), *(str(warning.message) for warning in caught)]
    return []


def ends_early(rank, path):
    """Rank 1 has an error of its own in the middle of training."""

    def wrong(rank, step, model, recorder):
        if rank == 1 and step == 2:
            os._exit(1)

    train(rank, path, wrong=wrong)
