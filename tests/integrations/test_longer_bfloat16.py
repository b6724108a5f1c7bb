"""Runs under bfloat16 autocast that are long enough for gradients to lie across the audit's random matrix now and then."""

import pytest
import torch

import dualform
from halves import require

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of PEFT


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def with_adapters():
    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), settings)


@pytest.mark.parametrize("make", [llama, with_adapters])
def test_two_hundred_steps_are_recorded_and_verified(tmp_path, make):
    require(torch.bfloat16)
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, fused=True)
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="bfloat16") as recorder:
        for _ in range(200):
            x = torch.randint(0, 8, (4, 6), generator=generator)
            recorder.batch(sample_id=range(4))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=x, labels=x).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    verified = dualform.open(tmp_path / "run", model).verify()
    assert verified.passed
    assert not verified.rows["assumed"].count()
