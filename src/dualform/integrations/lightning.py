"""Recording within the Trainer of Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import polars as pl
from lightning.pytorch import Callback, LightningModule, Trainer

from dualform.errors import BatchError
from dualform.integrations.managed import ManagedRecording, refuse

SAMPLE = "sample_id"


def take_sample_id(batch: Any) -> dict[str, Any]:
    """Take the sample ids out of a batch that is a dictionary."""
    if not isinstance(batch, MutableMapping) or SAMPLE not in batch:
        raise BatchError(
            f"the batch is {type(batch).__name__!r} where a dictionary with {SAMPLE!r} was expected. Say which samples are in a batch: "
            f'RecordTraining(…, columns=lambda batch: {{"sample_id": batch[2]}}).'
        )
    return {SAMPLE: batch.pop(SAMPLE)}


class RecordTraining(Callback):
    """Records what a Lightning Trainer trains into a folder."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Callable[[Any], Mapping[str, Any]] = take_sample_id,
        module: str = "",
        samples: pl.DataFrame | None = None,
        verify: bool = False,
        **options: Any,
    ):
        """columns: from a batch to the columns of recorder.batch(); default: `sample_id` is taken out of the batch, a dictionary.

        module: the name of the network within the LightningModule, which is recorded, and which questions are asked; default: all of it.
        samples: what is to be kept of each sample, such as its text, by its `sample_id`. verify: verify the recording at the end, and log the
        largest gap. options: those of `dualform.record()`.
        """
        self.recording = ManagedRecording(path, options, samples)
        self._columns = columns
        self._module = module
        self._verifies = verify
        self._global_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse trainers that spread a model or its batches over several devices or processes."""
        strategy = type(trainer.strategy).__name__
        refuse(
            {
                "DeepSpeed": "DeepSpeed" in strategy,
                "FSDP": "FSDP" in strategy,
                "tensor parallelism": "ModelParallel" in strategy,
                "several processes without DistributedDataParallel": trainer.world_size > 1 and "DDP" not in strategy,
            }
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin: optimizers are made, and a checkpoint is loaded."""
        self._global_step = trainer.global_step
        model: Any = pl_module.get_submodule(self._module)
        if trainer.world_size > 1:
            refuse({"module= of a training by several processes": bool(self._module)})
            model = trainer.strategy.model  # the DistributedDataParallel
        self.recording.begin(model, trainer.optimizers, resume=self.recording.steps_at(trainer.global_step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Name the rows of the forward pass that comes next."""
        self.recording.batch(self._columns(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """If an optimizer has stepped, keep the trainer's count, and log the cost of recording."""
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self.recording.finish_step(trainer.global_step)
        if trainer.global_step % getattr(trainer, "log_every_n_steps", 1) == 0:
            _log(trainer, self.recording.costs())

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Seal the recording, so that it can be resumed from this checkpoint."""
        self.recording.seal()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the recording."""
        _log(trainer, self.recording.costs())
        self.recording.end()
        if self._verifies:
            _log(trainer, self.recording.gap())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the recording with all finished steps."""
        self.recording.__exit__(type(exception), exception, exception.__traceback__)


def _log(trainer: Trainer, scalars: Mapping[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=trainer.global_step)
