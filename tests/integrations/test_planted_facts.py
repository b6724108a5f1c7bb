"""The benchmark of planted facts at a tiny size: asking for a fact finds the document that taught it."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("lightning", reason="lightning is not installed")

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from planted_facts import SETUPS, make_corpus, measure

pytestmark = [
    pytest.mark.filterwarnings("ignore:not recorded:UserWarning"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`"),
]


@pytest.mark.parametrize(
    "name", ["Trainer, full, fp32", "SFT packed, full, fp32", "SFT packed, LoRA, fp32", "Lightning, LoRA, fp32"]
)
def test_the_document_of_each_fact_comes_first(name):
    result = measure(SETUPS[name], make_corpus(40, 5), epochs=30, pretraining=100)
    assert result.is_verified
    assert result.names in ("proved", "one row a batch")
    assert result.found == 1
