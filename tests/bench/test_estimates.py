"""bench/estimates.py: models of billions of parameters need no memory, and what it says of small ones is what a recording takes."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import dualform
import estimates

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()
ROWS, LENGTH, STEPS, VOCABULARY = 4, 48, 20, 50_000
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_the_page_has_what_estimate_says():
    for table in estimates.tables().values():
        assert table in PAGE


def test_seven_billion_parameters_are_not_allocated():
    model = estimates.llama()
    assert sum(parameter.numel() for parameter in model.parameters()) > 6_700_000_000
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("size", estimates.PROJECTIONS)
def test_adapters_on_seven_billion_parameters_fit_in_100_gigabytes(size):
    assert estimates.of_lora(size).nbytes("projected") < 100e9


@pytest.mark.parametrize("keep", ["slots", "rows", "projected", "keys"])
def test_a_row_takes_what_was_estimated_on_the_meta_device(keep, tmp_path):
    on_meta = estimates.llama(rank=4, **SIZES)
    model = on_meta.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    settings = {"projection": 8} if keep == "projected" else {}
    with dualform.record(model, optimizer, tmp_path / "run", keep=keep, dtype="float16", **settings) as recorder:
        for _ in range(STEPS):
            tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
            recorder.batch(sample_id=range(ROWS))
            optimizer.zero_grad()
            logits = model(input_ids=tokens).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    found = dualform.estimate(
        estimates.llama(rank=4, **SIZES),
        rows=ROWS * STEPS,
        positions=LENGTH,
        batch=ROWS,
        dtype="float16",
        **settings,
    )
    chunks = sum(file.stat().st_size for file in (tmp_path / "run").glob("chunk-*/*"))
    assert found.bytes_of_slots(keep) == pytest.approx(chunks, rel=0.05)
