"""What GPT-2 and adapters on a model of 7 billion parameters would take, by `dualform.estimate`: models on the meta device, which takes no memory.

python bench/estimates.py   # prints docs/scale.md's tables; needs `pip install '.[transformers,peft]'`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dualform
from dualform.record.estimate import Estimate
from dualform.store.format import size_text

GPT2_TOKENS = 1_000_000_000
GPT2_LENGTH = 1024
LORA_TOKENS = 15_000_000
LORA_LENGTH = 512
RANK = 16
PROJECTIONS = (8, 16, 32, 64)


def gpt2() -> nn.Module:
    """GPT-2 of 124 M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model: nn.Module = GPT2LMHeadModel(GPT2Config())
    return model


def llama(rank: int = RANK, **sizes: Any) -> nn.Module:
    """Llama 2 of 7 billion parameters, with adapters on all linear layers. sizes: others than its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        adapted: nn.Module = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    return adapted


def of_gpt2(projection: int = PROJECTIONS[0], **settings: Any) -> Estimate:
    """A billion tokens through GPT-2, all maps of its blocks, 512 rows in an update."""
    rows = GPT2_TOKENS // GPT2_LENGTH
    return dualform.estimate(
        gpt2(),
        rows=rows,
        positions=GPT2_LENGTH,
        batch=512,
        dtype="float16",
        layers="transformer.h.*",
        projection=projection,
        **settings,
    )


def of_lora(projection: int = PROJECTIONS[0]) -> Estimate:
    """15 million tokens through the adapters, 16 rows in an update."""
    rows = LORA_TOKENS // LORA_LENGTH
    return dualform.estimate(
        llama(), rows=rows, positions=LORA_LENGTH, batch=16, dtype="float16", projection=projection
    )


def table(exact: Estimate, projected: dict[int, Estimate]) -> str:
    """Bytes by what is kept."""
    lines = ["| `keep=` | a row | in all | of these, snapshots | memory while recording |", "|---|--:|--:|--:|--:|"]
    lines += [_line(f'`"{keep}"`', exact, keep) for keep in ("slots", "rows", "keys")]
    lines += [_line(f'`"projected"`, {size} × {size}', one, "projected") for size, one in projected.items()]
    return "\n".join(lines)


def _line(title: str, found: Estimate, keep: str) -> str:
    numbers = [
        found.bytes_per_row(keep),
        found.nbytes(keep),
        found.bytes_of_snapshots(keep),
        found.memory(keep),
    ]
    return f"| {title} | {' | '.join(size_text(number) for number in numbers)} |"


def tables() -> dict[str, str]:
    """Both tables of docs/scale.md, by name."""
    found = {}
    for name, of in (("gpt2", of_gpt2), ("lora", of_lora)):
        projected = {size: of(size) for size in PROJECTIONS}
        found[name] = table(projected[PROJECTIONS[0]], projected)
    return found


if __name__ == "__main__":
    for name, text in tables().items():
        print(f"{name}\n{text}\n")
