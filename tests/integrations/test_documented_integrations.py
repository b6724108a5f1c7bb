"""The examples of docs/integrations.md are run as they stand."""

import re
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("lightning", reason="lightning is not installed")

import accelerate
import lightning
import torch
from peft import LoraConfig
from tiny_language import documents, llama, tokenizer, tokens
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
EXAMPLES = dict(re.findall(r"## (\w+)\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL))
SETTINGS = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "bf16": False}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`"),
]


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = llama().train()

    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def loader():
    encoded = tokenizer()(documents()["text"][:], padding=True, return_tensors="pt")["input_ids"]
    return DataLoader([{"input_ids": row, "labels": row, "sample_id": number} for number, row in enumerate(encoded)], 6)


def names(example):
    """What an example takes as given."""
    model = llama()
    given = {"model": model, "tokenizer": tokenizer(), "documents": documents(), "loader": loader()}
    if example == "Trainer":
        given |= {"Trainer": Trainer, "arguments": TrainingArguments("checkpoints", **SETTINGS), "tokens": tokens()}
        given |= {"collator": DataCollatorForLanguageModeling(tokenizer(), mlm=False)}
    elif example == "SFTTrainer":
        given |= {"SFTTrainer": SFTTrainer, "SFTConfig": SFTConfig, "settings": SETTINGS}
        given |= {"lora": LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")}
    elif example == "Accelerate":
        given |= {"accelerator": accelerate.Accelerator(cpu=True), "optimizer": torch.optim.AdamW(model.parameters())}
    else:
        settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        given |= {"lightning": lightning, "lightning_module": Network(), "settings": settings}
    return given


def test_there_is_one_for_each_integration():
    assert list(EXAMPLES) == ["Trainer", "SFTTrainer", "Accelerate", "Lightning"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_it_runs(tmp_path, monkeypatch, capsys, example):
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[example]
    assert len(code.strip().splitlines()) <= 15
    exec(compile(code, f"docs/integrations.md, {example}", "exec"), names(example))
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "manifest.json").exists()
    printed = capsys.readouterr().out
    assert "fail" not in printed
    assert ("documents by influence" in printed) or ("rows: proved at step 0" in printed)
