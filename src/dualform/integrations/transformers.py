"""Recording within the Trainer of Hugging Face Transformers, and TRL's SFTTrainer.

Sample ids are a column of the training dataset and travel in the batch, since a Trainer fetches all micro-batches of a step before the first
forward pass. They are taken out of it right before the model is called.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dualform.errors import RecordingError
from dualform.integrations.managed import ManagedRecording, refuse
from dualform.integrations.naming import SAMPLE, NamingCollator, Samples, name_documents, name_samples

FUSED_HEAD = "the trainer's loss multiplies by its weight directly, outside of the module, where no slots are seen"


def record(
    trainer: Trainer,
    path: str | os.PathLike[str],
    *,
    columns: str | Sequence[str] = (),
    documents: Any = None,
    verify: bool = False,
    **options: Any,
) -> Any:
    """Have `trainer.train()` recorded into the folder `path`; return the trainer. It resumes with the training, from a checkpoint.

    Rows are named by the column `sample_id` of `trainer.train_dataset`, or numbered in its order if it has none.
    columns: columns of the dataset to keep. Texts are stored once for each sample (`dual.samples`); numbers and booleans are recorded with each
    row, so that conditions and groups can use them.
    documents: the dataset given to an SFTTrainer that packs. Each position of a packed row is then named by the number (or `sample_id`) of its
    document; without it, by the number of its piece in the packed dataset.
    verify: verify the recording after the training, and log the largest gap.
    options: those of `dualform.record()`. initial= is "pretrained" where the model is known to come from from_pretrained().
    """
    if isinstance(trainer, RecordedTrainer):
        raise RecordingError("the training of this trainer is recorded already.")
    refuse_parallel(trainer)
    wanted = [columns] if isinstance(columns, str) else list(columns)
    collator = NamingCollator(trainer.data_collator)
    if getattr(trainer.args, "packing", False):
        dataset, samples = name_documents(trainer, documents, wanted)
    else:
        dataset, samples = name_samples(trainer.train_dataset, wanted, per_row=not collator.is_flattening)
    trainer._set_signature_columns_if_needed()
    signature: Any = trainer._signature_columns
    signature.append(SAMPLE)
    trainer.train_dataset = dataset
    trainer.data_collator = collator
    # A subclass of the user's own kind of trainer, made on the spot
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (RecordedTrainer, kind), {"__module__": kind.__module__})
    recorded = cast(RecordedTrainer, trainer)
    recorded.recording = ManagedRecording(path, options, samples.table)
    recorded.samples = samples
    recorded.verifies = verify
    recorded.head = fused_head(trainer.model)
    recorded.add_callback(_Moments(recorded))
    return trainer


class RecordedTrainer(Trainer):
    """What a recorded trainer does differently."""

    recording: ManagedRecording
    samples: Samples
    verifies: bool
    head: str | None
    """The output layer, if its weight is used outside of it."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. Whatever ends it, the recording is closed with all finished steps."""
        with self.recording:
            return super().train(*args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Take the sample ids out of a batch; in training, they name the rows of the forward pass that comes next."""
        ids = inputs.pop(SAMPLE, None)
        model = self.model
        if ids is not None and model is not None and model.training:
            self.recording.batch(self.samples.columns_of(ids))
        return super()._prepare_inputs(inputs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the cost of recording, too."""
        if self.recording.recorder is not None:
            logs.update(self.recording.costs())
        super().log(logs, *args, **kwargs)

    def begin_recording(self) -> None:
        """Model and optimizer are ready."""
        model = self.model_wrapped  # what torch.compile() gave, if the trainer compiles
        optimizer = cast(torch.optim.Optimizer, self.optimizer)
        left_out = {} if self.head is None else {self.head: FUSED_HEAD}
        resume = self.recording.steps_at(self.state.global_step)
        if is_pretrained(self.model):
            self.recording.began_from("pretrained")
        self.recording.begin(model, optimizer, resume=resume, left_out=left_out)

    def end_recording(self) -> None:
        """Training has ended; weights may now be replaced by those of the best checkpoint."""
        self.recording.end()
        if self.verifies:
            self.log(self.recording.gap())


class _Moments(TrainerCallback):
    """Tells a recorded trainer where its training is."""

    def __init__(self, trainer: RecordedTrainer):
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.begin_recording()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.recording.finish_step(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.recording.seal()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        # The trainer's summary, right before it may load the best checkpoint. on_train_end comes after that
        if "train_runtime" in (logs or {}) and self._trainer.recording.recorder is not None:
            self._trainer.end_recording()


def is_pretrained(model: Any) -> bool:
    """Return whether all weights that are trained are known to come from from_pretrained(): not so of adapters, and of a new head."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return bool(trained) and all(getattr(parameter, "_is_hf_initialized", False) for parameter in trained)


def refuse_parallel(trainer: Trainer) -> None:
    """Refuse trainers that spread a model or its batches over several devices or processes."""
    args = trainer.args
    setups = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "tensor parallelism": trainer.get_tp_size() > 1,
        "context parallelism": trainer.get_cp_size() > 1,
        "sequence parallelism": trainer.get_sp_size() > 1,
        "DataParallel": args.n_gpu > 1,
    }
    refuse(setups)


def fused_head(model: Any) -> str | None:
    """Return the name of a trained output layer whose weight TRL's fused loss uses outside of it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = getattr(base.forward, "__func__", base.forward)
    if getattr(forward, "__code__", None) is None or forward.__code__.co_name != "_fused_forward":
        return None
    head = base.get_output_embeddings()
    if not any(parameter.requires_grad for parameter in head.parameters()):
        return None
    names = {module: name for name, module in model.named_modules()}
    return str(names[head])
