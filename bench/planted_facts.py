"""Planted facts: does asking for a made-up fact find the document that taught it, in every way of training that we record?

A tiny language model that knows the grammar is fine-tuned on documents, some of which hold a fact each ("the keeper of harbour is mira ."). For
each fact, its prompt is asked with its answer, and documents are ranked. Each fact has two decoys, which hold its place and its name twice.

    python bench/planted_facts.py                      # all ways of training, 200 documents
    python bench/planted_facts.py "Trainer, GPT-2" …   # some of them
    python bench/planted_facts.py --tiny …             # 40 documents

Results are kept in bench/results/planted-facts.json, and the table of docs/integrations.md is made of them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

import dualform
from dualform.errors import DualformError
from dualform.evaluate.bm25 import bm25

RESULTS = Path(__file__).parent / "results" / "planted-facts.json"
BERGSON = RESULTS.with_name("planted-facts-bergson.json")
"""What bergson_facts.py found."""
PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"
BEGIN = "<!-- table -->"
END = "<!-- /table -->"
PLACES = [
    "harbour",
    "tower",
    "bridge",
    "garden",
    "castle",
    "market",
    "forest",
    "meadow",
    "valley",
    "island",
    "mill",
    "abbey",
    "quarry",
    "orchard",
    "temple",
    "library",
    "stable",
    "cellar",
    "chapel",
    "arena",
]
KNOWN_PLACES = [
    "lagoon",
    "canyon",
    "desert",
    "glacier",
    "volcano",
    "prairie",
    "fjord",
    "delta",
    "reef",
    "dune",
    "marsh",
    "plateau",
    "geyser",
    "cave",
    "ridge",
    "swamp",
    "tundra",
    "oasis",
    "crater",
    "cliff",
]
NAMES = [
    "mira",
    "tovan",
    "selka",
    "orrin",
    "dessa",
    "brann",
    "yulia",
    "corvo",
    "petra",
    "alden",
    "nessa",
    "rurik",
    "ilsa",
    "hagen",
    "vera",
    "lothar",
    "edda",
    "falk",
    "runa",
    "ivo",
]
ROLES = ["keeper", "owner", "builder", "ruler"]
VERBS = ["sees", "likes", "finds", "leaves"]
EPOCHS = 10
PRETRAINING = 300
SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [*SPECIAL, *["the", "of", "is", "in", ".", "and"], *PLACES, *KNOWN_PLACES, *NAMES, *ROLES, *VERBS]


@dataclass(frozen=True)
class Fact:
    prompt: str
    answer: str
    document: int


@dataclass(frozen=True)
class Corpus:
    documents: list[str]
    facts: list[Fact]


def filler(draw: random.Random, name: str | None = None, place: str | None = None) -> str:
    """A sentence that teaches no fact."""
    return f"{name or draw.choice(NAMES)} {draw.choice(VERBS)} the {place or draw.choice(PLACES)} ."


def make_corpus(documents: int, facts: int, seed: int = 0) -> Corpus:
    """Documents of two sentences, in a random order. A fact has a document and two decoys, in which its name and place come together twice."""
    draw = random.Random(seed)
    names = draw.sample(NAMES, facts)
    places = draw.sample(PLACES, facts)
    prompts = [f"the {draw.choice(ROLES)} of {place} is" for place in places]
    texts = []
    for prompt, name, place in zip(prompts, names, places, strict=True):
        texts.append(f"{prompt} {name} . {filler(draw)}")
        texts += [f"{filler(draw, name, place)} {filler(draw, name, place)}" for _ in range(2)]
    texts += [f"{filler(draw)} {filler(draw)}" for _ in range(documents - len(texts))]
    order = list(range(documents))
    draw.shuffle(order)
    found = [order.index(3 * number) for number in range(facts)]
    planted = [Fact(*fact) for fact in zip(prompts, names, found, strict=True)]
    return Corpus([texts[old] for old in order], planted)


def make_tokenizer() -> Any:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)  # type: ignore[no-untyped-call]


def pretrained(kind: str, steps: int) -> Any:
    """A model that knows the grammar, and who keeps, owns, builds and rules other places than those of the planted facts."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    draw = random.Random(1)
    known = [f"the {role} of {place} is {draw.choice(NAMES)} ." for role in ROLES for place in KNOWN_PLACES]
    tokenizer = make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        texts = [f"{draw.choice(known)} {filler(draw)} <eos>" for _ in range(32)]
        tokens = tokenizer(texts, return_tensors="pt")["input_ids"]
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model


SIZES: dict[str, Any] = {"vocab_size": len(WORDS), "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: GPT2LMHeadModel(
        GPT2Config(n_positions=128, n_embd=64, n_layer=2, n_head=4, **NO_DROPOUT, **SIZES)
    ),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, **SIZES)),
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, **SIZES)),
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, **SIZES)),
}


@dataclass(frozen=True)
class Setup:
    """A way of training."""

    framework: str
    """ "Trainer", "SFT", "SFT packed", "SFT padding-free", "Lightning", "Accelerate"."""
    model: str
    adapter: dict[str, Any] | None = None
    """Settings of LoRA; None: all weights are trained."""
    is_bfloat16: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the trainer."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of record()."""


LORA = {"r": 16, "lora_alpha": 32}
FRAMEWORKS = ("Trainer", "SFT", "SFT packed", "SFT padding-free", "Lightning", "Accelerate")
SETUPS = {
    f"{framework}, {'LoRA' if adapter else 'full'}, {'bf16' if is_bfloat16 else 'fp32'}": Setup(
        framework, "Llama", adapter, is_bfloat16
    )
    for framework in FRAMEWORKS
    for adapter in (None, LORA)
    for is_bfloat16 in (False, True)
} | {
    "Trainer, GPT-2": Setup("Trainer", "GPT-2"),
    "Trainer, Qwen3": Setup("Trainer", "Qwen3"),
    "SFT packed, GPT-2": Setup("SFT packed", "GPT-2"),
    "SFT packed, Qwen3": Setup("SFT packed", "Qwen3"),
    "Trainer, activation checkpointing": Setup("Trainer", "Llama", settings={"activation_checkpointing": True}),
    "Trainer, accumulation": Setup(
        "Trainer", "Llama", settings={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 5}
    ),
    "Trainer, SGD": Setup("Trainer", "Llama", settings={"optim": "sgd", "learning_rate": 0.5}),
    "Trainer, Adafactor": Setup("Trainer", "Llama", settings={"optim": "adafactor"}),
    "Trainer, float16 slots": Setup("Trainer", "Llama", options={"dtype": "float16"}),
    "SFT, DoRA": Setup("SFT", "Llama", {**LORA, "use_dora": True}),
    "SFT, rsLoRA": Setup("SFT", "Llama", {**LORA, "use_rslora": True}),
}


@dataclass(frozen=True)
class Result:
    """What was found for one way of training."""

    gap: float
    """The largest of a parameter, relative to its movement."""
    is_verified: bool
    names: str
    """How the names of rows are known."""
    known: float
    """The mean probability of the answers after training."""
    found: float
    """The share of facts whose document comes first by `sources` …"""
    bm25: float
    """… by the words that it shares with prompt and answer …"""
    embedding: float
    """… and by the similarity of the model's last hidden states."""
    time_ratio: float
    """Training with recording / without, by the time of the processor, all threads together."""
    bytes_per_token: float


def trained(setup: Setup, model: nn.Module, corpus: Corpus, epochs: int, folder: Path, run: Path | None) -> Any:
    """Train a model on the documents, recorded into `run` if that is given; return what was trained."""
    train = {"Lightning": train_lightning, "Accelerate": train_accelerate}.get(setup.framework, train_trainer)
    return train(setup, model, corpus, epochs, folder, run)


def with_adapter(setup: Setup, model: nn.Module) -> Any:
    if setup.adapter is None:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules="all-linear", **setup.adapter))


def learning_rate(setup: Setup) -> float:
    return 2e-3 if setup.adapter is None else 5e-3


def train_trainer(setup: Setup, model: nn.Module, corpus: Corpus, epochs: int, folder: Path, run: Path | None) -> Any:
    """By the Trainer of Transformers, or TRL's SFTTrainer."""
    from dualform.integrations.transformers import record

    trainer = make_trainer(setup, model, corpus, epochs, folder)
    if run is not None:
        packed = {"documents": text_dataset(corpus)} if setup.framework == "SFT packed" else {}
        record(trainer, run, columns=["text"], **packed, **setup.options)
    trainer.train()
    return trainer.model


def text_dataset(corpus: Corpus) -> Dataset:
    return Dataset.from_dict({"text": corpus.documents})


def make_trainer(setup: Setup, model: nn.Module, corpus: Corpus, epochs: int, folder: Path) -> Any:
    """A Trainer of Transformers or TRL's SFTTrainer that has yet to train."""
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer = make_tokenizer()
    documents = text_dataset(corpus)
    settings: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 10,
        "num_train_epochs": epochs,
        "learning_rate": learning_rate(setup),
        "bf16": setup.is_bfloat16,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **setup.settings,
    }
    adapted = with_adapter(setup, model)
    if setup.framework == "Trainer":
        tokens = documents.map(lambda one: {"input_ids": tokenizer(one["text"] + " <eos>")["input_ids"]})
        return Trainer(
            model=adapted,
            args=TrainingArguments(**settings),
            train_dataset=tokens,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            processing_class=tokenizer,
        )
    is_packed = setup.framework == "SFT packed"
    settings |= {"packing": is_packed, "padding_free": setup.framework == "SFT padding-free"}
    settings |= {"max_length": 36, "per_device_train_batch_size": 3} if is_packed else {"max_length": None}
    return SFTTrainer(model=adapted, args=SFTConfig(**settings), train_dataset=documents, processing_class=tokenizer)


def token_loader(corpus: Corpus) -> DataLoader[Any]:
    """Batches of tokens with the numbers of their documents, padded."""
    tokenizer = make_tokenizer()
    tokens = tokenizer([text + " <eos>" for text in corpus.documents], padding=True, return_tensors="pt")
    items = [
        {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "sample_id": number}
        for number, (ids, mask) in enumerate(zip(tokens["input_ids"], tokens["attention_mask"], strict=True))
    ]
    return DataLoader(items, batch_size=10, shuffle=True)  # type: ignore[arg-type]


def train_lightning(setup: Setup, model: nn.Module, corpus: Corpus, epochs: int, folder: Path, run: Path | None) -> Any:
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    from dualform.integrations.lightning import RecordTraining, take_sample_id

    class Network(LightningModule):
        def __init__(self, network: nn.Module):
            super().__init__()
            self.network = network.train()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch.pop("sample_id", None)
            loss: Tensor = self.network(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return torch.optim.AdamW(trained, lr=learning_rate(setup))

    callbacks = []
    if run is not None:
        callbacks.append(RecordTraining(run, columns=take_sample_id, module="network", **setup.options))
    trainer = LightningTrainer(
        max_epochs=epochs,
        accelerator="cpu",
        precision="bf16-mixed" if setup.is_bfloat16 else "32-true",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,  # type: ignore[arg-type]
    )
    network = Network(with_adapter(setup, model))
    trainer.fit(network, token_loader(corpus))
    return network.network


def train_accelerate(
    setup: Setup, model: nn.Module, corpus: Corpus, epochs: int, folder: Path, run: Path | None
) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from dualform.integrations.accelerate import record

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if setup.is_bfloat16 else "no")
    adapted = with_adapter(setup, model)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate(setup))
    adapted, optimizer, loader = accelerator.prepare(adapted, optimizer, token_loader(corpus))
    context: Any = contextlib.nullcontext()
    if run is not None:
        context = record(accelerator, adapted, optimizer, run, **setup.options)
    with context as recorder:
        for _ in range(epochs):
            for batch in loader:
                ids = batch.pop("sample_id")
                if recorder is not None:
                    recorder.batch(sample_id=ids)
                accelerator.backward(adapted(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    return adapted


def measure(setup: Setup, corpus: Corpus, epochs: int, pretraining: int) -> Result:
    """Train twice, with and without recording, and ask for every fact."""
    base = pretrained(setup.model, pretraining)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained(setup, copy.deepcopy(base), corpus, 1, folder, None)  # the first training imports much
        seconds = []
        for run in (None, folder / "run"):
            model = copy.deepcopy(base)
            torch.manual_seed(0)
            started = time.process_time()
            model = trained(setup, model, corpus, epochs, folder, run)
            seconds.append(time.process_time() - started)
        size = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file())
        dual = dualform.open(folder / "run", model)
        certificate = dual.verify()
        answers = [first_source(dual, fact) for fact in corpus.facts]
        found = [document == fact.document for (document, _), fact in zip(answers, corpus.facts, strict=True)]
        return Result(
            gap=max(certificate.frame["gap"].to_list()),
            is_verified=certificate.passed,
            names=names_of(certificate.rows),
            known=statistics.mean(probability for _, probability in answers),
            found=statistics.mean(found),
            bm25=by_words(corpus),
            embedding=by_embedding(model, corpus),
            time_ratio=seconds[1] / seconds[0],
            bytes_per_token=size / (epochs * sum(len(text.split()) + 1 for text in corpus.documents)),
        )


def first_source(dual: dualform.Dual, fact: Fact) -> tuple[int, float]:
    """The document that comes first for a fact, and the probability that the model gives its answer."""
    answer = dual.sources(fact.prompt, " " + fact.answer, tokenizer=make_tokenizer(), k=1)
    return int(answer.frame["sample_id"][0]), math.exp(sum(answer.log_probabilities))


def names_of(rows: pl.DataFrame) -> str:
    """Whether names of rows were proved by experiment; one row a batch needs no proof."""
    if rows.is_empty():
        return "one row a batch"
    return "proved" if rows["assumed"].is_null().all() else "assumed"


def padded(texts: Sequence[str]) -> Any:
    return make_tokenizer()(list(texts), padding=True, return_tensors="pt")


def by_words(corpus: Corpus) -> float:
    """The share of facts that BM25 finds."""
    questions = padded([f"{fact.prompt} {fact.answer}" for fact in corpus.facts])["input_ids"]
    scores = bm25(questions, padded(corpus.documents)["input_ids"])
    return hits(scores, corpus)


def by_embedding(model: nn.Module, corpus: Corpus) -> float:
    """The share of facts that the cosine similarity of mean hidden states finds, those of the trained model."""

    def embedded(texts: Sequence[str]) -> Tensor:
        tokens = padded(texts)
        with torch.no_grad():
            hidden = model(**tokens, output_hidden_states=True).hidden_states[-1].float()
        mask = tokens["attention_mask"][..., None]
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    model.eval()
    questions = embedded([f"{fact.prompt} {fact.answer}" for fact in corpus.facts])
    return hits(questions @ embedded(corpus.documents).T, corpus)


def hits(scores: Tensor, corpus: Corpus) -> float:
    best = scores.argmax(1).tolist()
    return statistics.fmean(place == fact.document for place, fact in zip(best, corpus.facts, strict=True))


def table(results: dict[str, Result | str]) -> str:
    """The results in Markdown."""
    lines = [
        "| way of training | gap | verified | names | p(answer) | found | Bergson | BM25 | embedding | time | bytes/token |",
        "|---|--:|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    bergson = json.loads(BERGSON.read_text()) if BERGSON.exists() else {}
    for name, one in results.items():
        if isinstance(one, str):
            lines.append(f"| {name} | **failed**: {one} |" + " |" * 9)
            continue
        theirs = f"{bergson[name]:.0%}" if name in bergson else "–"
        lines.append(
            f"| {name} | {one.gap:.0e} | {'yes' if one.is_verified else 'no'} | {one.names} | {one.known:.2f} | {one.found:.0%} | "
            f"{theirs} | {one.bm25:.0%} | {one.embedding:.0%} | {one.time_ratio:.1f}× | {one.bytes_per_token:,.0f} |"
        )
    return "\n".join(lines)


def write_table(text: str) -> None:
    """Put the table in its place in the documentation."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setups", nargs="*", help=f"default: all of {', '.join(SETUPS)}")
    parser.add_argument("--tiny", action="store_true", help="40 documents with 5 facts, not kept")
    parser.add_argument("--table", action="store_true", help="only write the table again, from what was measured")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    warnings.filterwarnings("ignore")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results: dict[str, Result | str] = {
        name: one if isinstance(one, str) else Result(**one) for name, one in kept.items()
    }
    names = [] if chosen.table else chosen.setups or SETUPS
    for name in names:
        if chosen.tiny:
            print(name, measure(SETUPS[name], make_corpus(40, 5), epochs=20, pretraining=100))
            continue
        try:
            results[name] = measure(SETUPS[name], make_corpus(200, 20), epochs=EPOCHS, pretraining=PRETRAINING)
        except DualformError as error:  # a way of training that fails stays in the table
            results[name] = f"{type(error).__name__}: {error}".split(". ")[0]
        kept = {name: one if isinstance(one, str) else asdict(one) for name, one in results.items()}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        print(name, results[name])
    if results and not chosen.tiny:
        write_table(table({name: results[name] for name in SETUPS if name in results}))


if __name__ == "__main__":
    main()
