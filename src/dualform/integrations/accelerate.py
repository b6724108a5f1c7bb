"""Recording within a training loop that uses Hugging Face Accelerate."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.optim import Optimizer

from dualform.integrations.managed import ManagedRecording, refuse
from dualform.record import Recorder

STEP_FILE = "dualform.json"
"""In a checkpoint: how many steps were recorded when it was saved."""


@contextlib.contextmanager
def record(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    samples: pl.DataFrame | None = None,
    verify: bool = False,
    **options: Any,
) -> Iterator[Recorder]:
    """Record a training loop into the folder `path`. model, optimizer: as accelerator.prepare() has returned them.

    Whenever accelerator.save_state() saves a checkpoint, the recording is sealed, and its cost is logged to the accelerator's trackers.
    checkpoint: what accelerator.load_state() has loaded; the recording goes on from there.
    samples: what is to be kept of each sample, such as its text, by its `sample_id`. verify: verify the recording at the end, and log the
    largest gap. options: those of `dualform.record()`.
    """
    refuse_parallel(accelerator)
    recording = ManagedRecording(path, options, samples)
    resume = False if checkpoint is None else json.loads(Path(checkpoint, STEP_FILE).read_text())["step"]
    with recording:
        recorder = recording.begin(model, optimizer, resume=resume)

        def seal(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            Path(folder, STEP_FILE).write_text(json.dumps({"step": recorder.seal()}))
            accelerator.log(recording.costs(), step=recorder.step)

        handle = accelerator.register_save_state_pre_hook(seal)
        try:
            yield recorder
        finally:
            handle.remove()
        steps = recorder.step
        accelerator.log(recording.costs(), step=steps)
    if verify:
        accelerator.log(recording.gap(), step=steps)


def refuse_parallel(accelerator: Accelerator) -> None:
    """Refuse accelerators that spread a model or its batches over several devices or processes."""
    kind = accelerator.distributed_type
    refuse(
        {
            "DeepSpeed": kind == DistributedType.DEEPSPEED,
            "FSDP": kind == DistributedType.FSDP,
            "Megatron-LM": kind == DistributedType.MEGATRON_LM,
            "DistributedDataParallel": accelerator.num_processes > 1,
        }
    )
