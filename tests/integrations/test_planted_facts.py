"""The benchmark of planted facts at a tiny size: asking for a fact finds the document that taught it."""

import gc
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("lightning", reason="lightning is not installed")

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import dualform
from planted_facts import SETUPS, first_source, make_corpus, measure, names_of, pretrained, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:not recorded:UserWarning"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`"),
]


TRAINED = ["Trainer, full, fp32", "SFT packed, full, fp32", "SFT packed, LoRA, fp32", "Lightning, LoRA, fp32"]
"""Ways of training that are tried until the model knows its facts."""


@pytest.mark.parametrize("name", TRAINED)
def test_the_document_of_each_fact_comes_first(name):
    result = measure(SETUPS[name], make_corpus(40, 5), epochs=30, pretraining=100)
    assert result.is_verified
    assert result.names in ("proved", "one row a batch")
    assert result.found == 1


@pytest.fixture(scope="module")
def frozen_objects():
    """Trainers collect garbage at every end: what was imported need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", [name for name in SETUPS if name not in TRAINED])
def test_every_way_of_training_in_the_table_is_verified_and_names_documents(name, tmp_path, frozen_objects):
    setup = SETUPS[name]
    corpus = make_corpus(15, 3)
    run = tmp_path / "run"
    model = trained(setup, pretrained(setup.model, 0), corpus, 1, tmp_path, run)
    dual = dualform.open(run, model)
    certificate = dual.verify()
    assert certificate.passed, certificate
    assert names_of(certificate.rows) in ("proved", "one row a batch")
    document, _ = first_source(dual, corpus.facts[0])
    assert 0 <= document < len(corpus.documents)
    is_rounded = setup.is_bfloat16 or setup.options.get("dtype") == "float16"
    assert certificate.frame["gap"].max() < (0.05 if is_rounded else 1e-3)
