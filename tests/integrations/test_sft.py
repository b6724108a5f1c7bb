"""TRL's SFTTrainer: packed and padding-free rows name the document of each position; adapters; the head that its loss bypasses."""

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from peft import LoraConfig
from tiny_language import documents, gpt2, llama, tokenizer
from trl import SFTConfig, SFTTrainer

import dualform
from dualform.errors import RecordingError
from dualform.integrations.naming import NO_SAMPLE
from dualform.integrations.transformers import FUSED_HEAD, record
from halves import require

pytestmark = [
    pytest.mark.filterwarnings("ignore:not recorded:UserWarning"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def make_trainer(tmp_path, model=None, peft_config=None, **settings):
    arguments = {
        "output_dir": tmp_path / "checkpoints",
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_length": 32,
    }
    return SFTTrainer(
        model=gpt2() if model is None else model,
        args=SFTConfig(**{**arguments, **settings}),
        train_dataset=documents(),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


class SeenTokens:
    """The tokens of each row that a model was really trained on."""

    def __init__(self, model):
        self.rows = []
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model, args, kwargs):
        if torch.is_grad_enabled() and "input_ids" in kwargs:  # else a question is asked
            self.rows += kwargs["input_ids"].tolist()


def train(trainer, run, **options):
    seen = SeenTokens(trainer.model)
    record(trainer, run, **options).train()
    dual = dualform.open(run, trainer.model)
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert certificate.rows["assumed"].is_null().all(), str(certificate)
    return dual, seen.rows


def tokens_by_document(ids, rows):
    """What recorded names say about the tokens that were seen: for each document and visit, its tokens in their order."""
    found = []
    for names, row in zip(ids, rows, strict=True):
        assert len(names) == len(row)
        tokens = {}
        for name, token in zip(names, row, strict=True):
            tokens.setdefault(name, []).append(token)
        tokens.pop(NO_SAMPLE, None)
        found.extend(tokens.items())
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": True},
        {"packing": True, "shuffle_dataset": True, "gradient_accumulation_steps": 2},
        {"packing": True, "pad_to_multiple_of": 8},
        {"padding_free": True, "max_length": None},
    ],
    ids=["packed", "shuffled", "padded to a multiple", "padding-free"],
)
def test_each_position_names_its_document(tmp_path, settings):
    trainer = make_trainer(tmp_path, **settings)
    dual, rows = train(trainer, tmp_path / "run", documents=documents(), columns=["text"])
    encode = tokenizer()
    named = tokens_by_document(dual.rows["sample_id"], rows)
    assert len(named) == 2 * 18
    for document, tokens in named:
        assert tokens == encode(documents()[document]["text"] + "<eos>")["input_ids"]
    assert dual.samples["text"].str.strip_suffix("<eos>").to_list() == documents()["text"][:]


def test_documents_that_are_cut_in_the_middle_of_a_row(tmp_path):
    trainer = make_trainer(
        tmp_path, packing=True, packing_strategy="wrapped", max_length=16, per_device_train_batch_size=3
    )
    dual, rows = train(trainer, tmp_path / "run", documents=documents())
    seen = {}
    for document, tokens in tokens_by_document(dual.rows["sample_id"], rows):
        seen.setdefault(document, []).extend(tokens)
    encode = tokenizer()
    for document, text in enumerate(documents()["text"]):
        assert sorted(seen[document]) == sorted(2 * encode(text + "<eos>")["input_ids"])


def test_without_the_documents_pieces_are_numbered_and_decoded(tmp_path):
    trainer = make_trainer(tmp_path, packing=True)
    dual, rows = train(trainer, tmp_path / "run", columns=["text"])
    decode = tokenizer().decode
    assert sorted(dual.samples["text"]) == sorted(text + " <eos>" for text in documents()["text"])
    for piece, tokens in tokens_by_document(dual.rows["sample_id"], rows):
        assert dual.samples["text"][piece] == decode(tokens)


def test_other_documents_than_were_packed_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, packing=True)
    with pytest.raises(RecordingError, match="other tokens"):
        record(trainer, tmp_path / "run", documents=documents(17))


def test_pieces_of_wrapped_packing_are_refused_without_the_documents(tmp_path):
    trainer = make_trainer(tmp_path, packing=True, packing_strategy="wrapped")
    with pytest.raises(RecordingError, match="documents="):
        record(trainer, tmp_path / "run")


@pytest.mark.parametrize("method", ["influence", "contribution"])
def test_sources_among_the_documents_of_packed_rows(tmp_path, method):
    trainer = make_trainer(tmp_path, model=llama(), packing=True)
    dual, _ = train(trainer, tmp_path / "run", documents=documents(), columns=["text"])
    found = dual.sources("the red", " river", tokenizer=tokenizer(), k=18, method=method).frame
    assert sorted(found["sample_id"]) == list(range(18))
    assert found["text"].to_list() == [documents()[document]["text"] for document in found["sample_id"]]


def test_the_head_that_the_loss_bypasses_is_left_out_with_the_reason(tmp_path):
    trainer = record(make_trainer(tmp_path, model=llama()), tmp_path / "run")
    with pytest.warns(
        UserWarning, match="not recorded: 'lm_head': the trainer's loss multiplies by its weight directly"
    ):
        trainer.train()
    dual = dualform.open(tmp_path / "run", trainer.model)
    assert dual.store.manifest.left_out["lm_head"] == FUSED_HEAD
    assert "lm_head" not in dual.layers
    assert dual.verify().passed


def test_low_rank_adapters(tmp_path):
    trainer = make_trainer(tmp_path, model=llama(), peft_config=LORA)
    dual, _ = train(trainer, tmp_path / "run")
    assert len(dual.layers) == 28
    assert all("lora_" in name for name in dual.layers)


def test_the_defaults_of_trl(tmp_path):
    require(torch.bfloat16)
    trainer = make_trainer(tmp_path, model=llama(), peft_config=LORA, bf16=True, packing=True)
    assert trainer.args.gradient_checkpointing
    assert trainer.args.optim == "adamw_torch_fused"
    train(trainer, tmp_path / "run", documents=documents())


def test_only_completions_have_a_loss(tmp_path):
    trainer = make_trainer(tmp_path)
    halves = documents().map(
        lambda one: dict(zip(("prompt", "completion"), one["text"].split(" ", 4)[::4], strict=True))
    )
    trainer = SFTTrainer(
        model=gpt2(), args=trainer.args, train_dataset=halves.remove_columns("text"), processing_class=tokenizer()
    )
    dual, _ = train(trainer, tmp_path / "run")
    assert dual.rows.height == 36
