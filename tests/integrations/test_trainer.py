"""The Trainer of Transformers: ids stay with their samples, whatever the Trainer does with batches; the recording is proved."""

import json

import polars as pl
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

from tiny_language import gpt2, tokenizer, tokens
from torch.utils import data
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

import dualform
from dualform.errors import RecordingError
from dualform.integrations.transformers import record
from dualform.store.samples import SAMPLES
from halves import require, scale_gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


class Seen:
    """Which tokens a model was really trained on, forward pass by forward pass."""

    def __init__(self, model):
        self.batches = []
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model, args, kwargs):
        if torch.is_grad_enabled() and model.training and not torch.compiler.is_compiling():
            mask = kwargs["attention_mask"].bool()
            self.batches.append([row[keep].tolist() for row, keep in zip(kwargs["input_ids"], mask, strict=True)])


def make_trainer(tmp_path, model=None, dataset=None, kind=Trainer, **settings):
    arguments = {
        "output_dir": tmp_path / "checkpoints",
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    others = {name: settings.pop(name) for name in ("eval_dataset", "callbacks") if name in settings}
    encode = tokenizer()
    return kind(
        model=gpt2() if model is None else model,
        args=TrainingArguments(**{**arguments, **settings}),
        train_dataset=tokens() if dataset is None else dataset,
        data_collator=DataCollatorForLanguageModeling(encode, mlm=False),
        processing_class=encode,
        **others,
    )


def assert_proved(run, model):
    dual = dualform.open(run, model)
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert certificate.rows["assumed"].is_null().all(), str(certificate)
    return dual


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "all columns": {"remove_unused_columns": False},
    "workers": {"dataloader_num_workers": 2},
    "sorted by length": {"train_sampling_strategy": "group_by_length"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": tokens(6)},
    "evaluation of the training data": {"eval_strategy": "epoch", "eval_dataset": tokens()},
    "checkpointing": {"gradient_checkpointing": True},
    "clipping": {"max_grad_norm": 0.01, "optim": "adamw_torch"},
    "SGD": {"optim": "sgd"},
    "Adafactor": {"optim": "adafactor"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_recorded_ids_are_those_the_model_saw(tmp_path, settings):
    trainer = make_trainer(tmp_path, **settings)
    if settings.get("remove_unused_columns") is False:
        trainer.train_dataset = trainer.train_dataset.remove_columns(
            ["text"]
        )  # which no collator can put into a tensor
    seen = Seen(trainer.model)
    record(trainer, tmp_path / "run").train()
    dual = assert_proved(tmp_path / "run", trainer.model)
    known = tokens()["input_ids"]
    recorded = [known[sample] for sample in dual.rows["sample_id"]]
    assert recorded == [row for batch in seen.batches for row in batch]
    assert dual.rows["sample_id"].value_counts()["count"].unique().to_list() == [2]


def test_training_is_the_same_with_and_without_recording(tmp_path):
    plain = make_trainer(tmp_path)
    plain.train()
    recorded = make_trainer(tmp_path)  # seeds all random generators again
    record(recorded, tmp_path / "run").train()
    for one, other in zip(recorded.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bfloat16(tmp_path):
    require(torch.bfloat16)
    trainer = make_trainer(tmp_path, bf16=True)
    record(trainer, tmp_path / "run").train()
    assert_proved(tmp_path / "run", trainer.model)


@pytest.mark.parametrize("clip", [0.0, 0.1], ids=["without clipping", "clipped"])
def test_float16_with_a_gradient_scaler(tmp_path, clip):
    """The first scales overflow: these steps are none, and the Trainer counts them."""
    require(torch.float16)
    trainer = make_trainer(tmp_path, fp16=True, max_grad_norm=clip)
    scale_gradients(trainer.accelerator, init_scale=2.0**40, backoff_factor=2.0**-12, growth_interval=3)
    autocast = []
    trainer.model.lm_head.register_forward_hook(lambda module, args, output: autocast.append(output.dtype))
    record(trainer, tmp_path / "run").train()
    assert torch.float16 in autocast
    dual = assert_proved(tmp_path / "run", trainer.model)
    skipped = trainer.state.global_step - dual.end_step
    assert skipped > 0
    assert dual.end_step > 3
    assert dual.log["global_step"].to_list()[-1] == trainer.state.global_step


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled(tmp_path):
    trainer = make_trainer(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    record(trainer, tmp_path / "run").train()
    assert_proved(tmp_path / "run", trainer.model)


def test_texts_are_kept_once_and_numbers_with_each_row(tmp_path):
    trainer = make_trainer(tmp_path)
    record(trainer, tmp_path / "run", columns=["text", "length"]).train()
    dual = dualform.open(tmp_path / "run", trainer.model)
    assert dual.samples["text"].to_list() == tokens()["text"][:]
    joined = dual.rows.join(dual.samples, on="sample_id", suffix="_of_sample")
    assert joined.height == 36
    assert (joined["length"] == joined["text"].str.len_chars()).all()


def test_ids_of_the_dataset_are_used(tmp_path):
    dataset = tokens().add_column("sample_id", list(range(100, 118)))
    trainer = make_trainer(tmp_path, dataset=dataset)
    record(trainer, tmp_path / "run").train()
    assert set(dualform.open(tmp_path / "run").rows["sample_id"]) == set(range(100, 118))


def test_ids_that_are_no_numbers_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, dataset=tokens().rename_column("text", "sample_id"))
    with pytest.raises(RecordingError, match="expected int64"):
        record(trainer, tmp_path / "run")


def test_unknown_column_is_refused(tmp_path):
    with pytest.raises(RecordingError, match=r"columns=\['title'\].*It has text"):
        record(make_trainer(tmp_path), tmp_path / "run", columns=["title"])


class Tokens(data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"input_ids": tokens(8)[number]["input_ids"]}


@pytest.mark.parametrize("dataset", [Tokens(), tokens(8).to_iterable_dataset()], ids=["map-style", "iterable"])
def test_other_datasets_are_numbered(tmp_path, dataset):
    trainer = make_trainer(tmp_path, dataset=dataset, max_steps=4)
    seen = Seen(trainer.model)
    record(trainer, tmp_path / "run").train()
    known = tokens(8)["input_ids"]
    recorded = [known[sample] for sample in dualform.open(tmp_path / "run").rows["sample_id"]]
    assert recorded == [row for batch in seen.batches for row in batch]


def test_resumed_from_a_checkpoint(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3}
    first = make_trainer(tmp_path, callbacks=[StopAfter(4)], **settings)
    record(first, tmp_path / "run").train()
    assert dualform.open(tmp_path / "run").end_step == 4
    second = make_trainer(tmp_path, **settings)
    record(second, tmp_path / "run").train(resume_from_checkpoint=True)
    dual = assert_proved(tmp_path / "run", second.model)
    assert dual.log["global_step"].to_list() == list(range(1, 11))
    assert dual.rows["sample_id"].value_counts()["count"].unique().to_list() == [2]


def test_texts_when_a_run_is_resumed(tmp_path):
    """The table is written again; a dataset whose texts have changed is refused before the recording is touched."""
    settings = {"save_strategy": "steps", "save_steps": 3}
    first = make_trainer(tmp_path, callbacks=[StopAfter(3)], **settings)
    record(first, tmp_path / "run", columns=["text"]).train()
    changed = make_trainer(tmp_path, dataset=tokens().map(lambda one: {"text": one["text"].upper()}), **settings)
    with pytest.raises(RecordingError, match="sample 0 had another text when it was recorded"):
        record(changed, tmp_path / "run", columns=["text"]).train(resume_from_checkpoint=True)
    assert dualform.open(tmp_path / "run").samples["text"].to_list() == tokens()["text"][:]
    (tmp_path / "run" / SAMPLES).unlink()  # as if the process had been killed before it was written
    second = make_trainer(tmp_path, **settings)
    record(second, tmp_path / "run", columns=["text"]).train(resume_from_checkpoint=True)
    dual = assert_proved(tmp_path / "run", second.model)
    assert dual.samples["text"].to_list() == tokens()["text"][:]
    assert dual.end_step == 10


class StopAfter(TrainerCallback):
    def __init__(self, steps, error=None):
        self.steps = steps
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.steps and self.error is not None:
            raise self.error
        control.should_training_stop = state.global_step == self.steps


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_exception_closes_the_recording(tmp_path, error):
    trainer = make_trainer(tmp_path, callbacks=[StopAfter(3, error)])
    with pytest.raises(type(error)):
        record(trainer, tmp_path / "run").train()
    dual = assert_proved(tmp_path / "run", trainer.model)
    assert dual.end_step == 3
    assert dual.store.manifest.ended == type(error).__name__


def test_the_best_checkpoint_is_loaded_after_the_recording(tmp_path):
    settings = {"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}
    trainer = make_trainer(tmp_path, eval_dataset=tokens(4), **settings)
    trainer.args.greater_is_better = True  # so that it is not the last one
    record(trainer, tmp_path / "run").train()
    assert_proved(tmp_path / "run", trainer.model)


def test_gap_and_cost_are_logged(tmp_path):
    trainer = make_trainer(tmp_path, logging_steps=1)
    record(trainer, tmp_path / "run", verify=True).train()
    history = pl.DataFrame(trainer.state.log_history, infer_schema_length=None)
    assert history["dualform/steps"].drop_nulls().to_list() == [*range(1, 11), 10]
    assert history["dualform/bytes"].drop_nulls().min() > 0
    [gap] = history["dualform/gap"].drop_nulls()
    assert gap == dualform.open(tmp_path / "run").verify().frame["gap"].max()


@pytest.mark.parametrize(("attribute", "name"), [("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")])
def test_sharded_trainers_are_refused_by_name(tmp_path, attribute, name):
    trainer = make_trainer(tmp_path)
    setattr(trainer, attribute, True)
    with pytest.raises(RecordingError, match=name):
        record(trainer, tmp_path / "run")


def test_data_parallel_is_refused_by_name(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(RecordingError, match="DataParallel"):
        record(trainer, tmp_path / "run")


def test_a_trainer_is_recorded_once(tmp_path):
    trainer = record(make_trainer(tmp_path), tmp_path / "run")
    with pytest.raises(RecordingError, match="recorded already"):
        record(trainer, tmp_path / "other")


def test_options_of_record_are_passed_on(tmp_path):
    trainer = make_trainer(tmp_path)
    record(trainer, tmp_path / "run", layers="*.mlp.*", dtype="float16", exclude="*.0.mlp.c_fc").train()
    dual = dualform.open(tmp_path / "run")
    assert dual.layers == [f"transformer.h.{layer}" for layer in ("0.mlp.c_proj", "1.mlp.c_fc", "1.mlp.c_proj")]
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["dtype"] == "float16"


def test_resume_is_no_option(tmp_path):
    with pytest.raises(RecordingError, match="resume="):
        record(make_trainer(tmp_path), tmp_path / "run", resume=True)


def test_weights_of_from_pretrained_are_called_so(tmp_path):
    gpt2().save_pretrained(tmp_path / "published")
    pretrained = type(gpt2()).from_pretrained(tmp_path / "published")
    for model, name in ((pretrained, "pretrained"), (gpt2(), "initial weights")):
        record(make_trainer(tmp_path, model, num_train_epochs=1), tmp_path / name).train()
        assert dualform.open(tmp_path / name).info()["initial"] == name
    record(make_trainer(tmp_path, pretrained, num_train_epochs=1), tmp_path / "named", initial="phase one").train()
    assert dualform.open(tmp_path / "named").info()["initial"] == "phase one"
