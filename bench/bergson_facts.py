"""Planted facts asked of Bergson: the documents that its callback for the Trainer ranks first, for ways of training of planted_facts.py.

Bergson clashes with torchvision beside PyTorch's build for the CPU, so it has an environment of its own:

    python -m venv .venv-bergson
    .venv-bergson/bin/pip install -c constraints.txt -e '.[transformers,lightning,evaluate]' bergson trl peft
    .venv-bergson/bin/pip uninstall --yes torchvision torchaudio
    .venv-bergson/bin/python bench/bergson_facts.py

The callback stores the projected gradient of each document in each epoch, with its default settings: 16 × 16 numbers for each module, divided by
what the optimizer divides them by. A fact's query is the gradient of its answer's log-probability at the trained model. A document's score
is the sum over epochs of the products of both, or of their cosines; the better of these two counts for Bergson.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from torch import Tensor

import planted_facts as facts

RESULTS = Path(__file__).parent / "results" / "planted-facts-bergson.json"
ONE_DOCUMENT_A_ROW = ("Trainer", "SFT")
"""The callback knows rows: of packed ones, not the documents in them."""


def can_be_asked(setup: facts.Setup) -> bool:
    """Whether Bergson's callback sees the training: a Trainer's, one document a row, one batch an update, and no bfloat16 (an overflow ends it)."""
    is_accumulated = "gradient_accumulation_steps" in setup.settings
    return setup.framework in ONE_DOCUMENT_A_ROW and not is_accumulated and not setup.is_bfloat16


def train(setup: facts.Setup, corpus: facts.Corpus, epochs: int, pretraining: int, folder: Path) -> Any:
    """Train as planted_facts.py does, with Bergson's callback in place of our recorder; return the model."""
    from bergson.huggingface import GradientCollectorCallback, prepare_for_gradient_collection

    torch.manual_seed(0)
    trainer = facts.make_trainer(setup, facts.pretrained(setup.model, pretraining), corpus, epochs, folder)
    has_averages = setup.settings.get("optim") != "sgd"
    trainer.add_callback(GradientCollectorCallback(folder / "index", use_optimizer_state=has_averages))
    trainer = prepare_for_gradient_collection(trainer)
    trainer.train()
    return trainer.model


def scores_of(model: Any, fact: facts.Fact, index: Path, documents: int, *, cosine: bool) -> Tensor:
    """The score of each document for one fact, summed over epochs."""
    from bergson import Attributor

    total = torch.zeros(documents)
    inner = getattr(model, "base_model", model)
    for epoch in sorted((index / "train").glob("epoch_*")):
        attributor = Attributor(epoch, unit_norm=cosine)
        with attributor.trace(inner, None) as found:
            model.zero_grad()
            (-log_probability(model, fact)).backward()  # type: ignore[no-untyped-call]
        total[found.indices.flatten()] += found.scores.flatten().float()
    return total


def log_probability(model: Any, fact: facts.Fact) -> Tensor:
    """Of a fact's answer, given its prompt."""
    tokenizer = facts.make_tokenizer()
    prompt = tokenizer(fact.prompt, return_tensors="pt")["input_ids"]
    answer = tokenizer(fact.answer)["input_ids"][0]
    logits = model(input_ids=prompt).logits[0, -1]
    value: Tensor = logits.log_softmax(-1)[answer]
    return value


def measure(setup: facts.Setup, corpus: facts.Corpus, epochs: int, pretraining: int) -> float:
    """The share of facts whose document Bergson ranks first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = train(setup, corpus, epochs, pretraining, folder).eval()
        shares = []
        for cosine in (False, True):
            hits = []
            for fact in corpus.facts:
                scores = scores_of(model, fact, folder / "index", len(corpus.documents), cosine=cosine)
                hits.append(int(scores.argmax()) == fact.document)
            shares.append(statistics.fmean(hits))
    print(f"products {shares[0]:.0%}, cosines {shares[1]:.0%}")
    return max(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "setups", nargs="*", help="default: all that Bergson's callback sees and that were not measured yet"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    warnings.filterwarnings("ignore")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, setup in facts.SETUPS.items():
        is_wanted = name in chosen.setups if chosen.setups else name not in results
        if not can_be_asked(setup) or not is_wanted:
            continue
        results[name] = measure(setup, facts.make_corpus(200, 20), facts.EPOCHS, facts.PRETRAINING)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, results[name], flush=True)


if __name__ == "__main__":
    main()
