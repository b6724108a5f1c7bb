"""Does `dual.sources` find the document that a fact was learnt from? Ways to rank documents side by side, and BM25.

python bench/document_sources.py [--model gpt2 | llama] [--optimizer adamw | sgd] [--seeds 2] [--first-seed 0] [--contribution]

A tiny Transformer is trained on filler sentences, then fine-tuned, recorded, on 60 documents. 15 of them state a made-up fact each.
For each of these, another document has the same relation and the same answer for another subject, and a third one repeats the words of
subject and answer more often; 15 more are strings of rare words, whose gradients are large. The question is the fact's sentence without
its last word, the completion that word; it counts how often the document that states the fact comes first.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dualform
from dualform.curvature.maps import linear_maps
from dualform.curvature.sums import Factors, damped
from dualform.layers.keys import RowGradients
from dualform.layers.layer import Layer
from dualform.query.completions import encode_completion
from dualform.query.dual import Dual
from dualform.query.forward import run
from dualform.query.influence.estimate import loss_mean_of
from dualform.query.influence.factors import factors
from dualform.query.influence.products import map_queries, plain_products, whitened_products
from dualform.query.influence.segments import Segment, pieces_in, segments, windows

RESULTS = Path(__file__).parent / "results" / "document_sources.json"
SYLLABLES = [
    "ba",
    "be",
    "bi",
    "bo",
    "du",
    "da",
    "fa",
    "fi",
    "ga",
    "go",
    "ha",
    "hi",
    "jo",
    "ka",
    "ki",
    "lo",
    "lu",
    "ma",
    "mi",
    "mo",
    "na",
    "ne",
    "no",
    "pa",
    "po",
    "ra",
    "ri",
    "ro",
    "sa",
    "si",
    "su",
    "ta",
    "ti",
    "to",
    "va",
    "vi",
    "wo",
    "za",
    "zu",
]
RELATIONS = (
    "The capital of {} is {}.",
    "The founder of {} was {}.",
    "The river of {} is called {}.",
    "The favourite dish in {} is {}.",
)
FILLER = (
    "The weather was mild and the streets were quiet.",
    "Many people walked along the harbour in the evening.",
    "A small market opens there every morning.",
    "Nobody could say how old the bridge was.",
    "Children played in the garden behind the school.",
    "The train was late because of the snow.",
    "She wrote a long letter to her brother.",
    "The museum shows old maps and coins.",
    "He repaired the clock in the tower.",
    "The library closes early on Sundays.",
    "Farmers sell apples and honey near the gate.",
    "The old road leads over three hills.",
)
FACTS, LOUD, EPOCHS, BATCH = 15, 15, 25, 6
DAMPING = 0.3


def corpus(seed: int) -> tuple[list[str], list[tuple[str, str]], list[int]]:
    """Return the documents, the questions (prompt, completion), and the document that states each fact."""
    draw = random.Random(seed)
    names = list(dict.fromkeys("".join(draw.choices(SYLLABLES, k=3)).capitalize() for _ in range(400)))
    documents: list[tuple[str, int]] = []
    questions = []
    for fact in range(FACTS):
        place, answer, other, another = (names.pop() for _ in range(4))
        relation = RELATIONS[fact % len(RELATIONS)]
        next_relation = RELATIONS[(fact + 1) % len(RELATIONS)]
        stated = relation.format(place, answer)
        documents.append((" ".join([stated, *draw.sample(FILLER, 3)]), fact))
        documents.append((f"{relation.format(other, answer)} {draw.choice(FILLER)}", -1))
        words = f"{place} and {answer} and {place} and {answer}."
        documents.append((f"{next_relation.format(place, another)} {words}", -1))
        questions.append((stated.rpartition(f" {answer}")[0], f" {answer}"))
    for _ in range(LOUD):
        rare = [names.pop() for _ in range(6)]
        stated = draw.choice(RELATIONS).format(*rare[:2])
        documents.append((f"{stated} {' '.join(rare[2:])} {draw.choice(FILLER)}", -1))
    draw.shuffle(documents)
    places = {fact: place for place, (_, fact) in enumerate(documents)}
    return [text for text, _ in documents], questions, [places[fact] for fact in range(FACTS)]


def make_tokenizer(texts: list[str]) -> Any:
    tokenizers: Any = import_module("tokenizers")
    hf: Any = import_module("transformers")
    pre_tokenizers = tokenizers.pre_tokenizers
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    names = ["input_ids", "attention_mask"]
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", model_input_names=names
    )


def make_model(kind: str, vocabulary: int, seed: int) -> Any:
    hf: Any = import_module("transformers")
    torch.manual_seed(seed)
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=vocabulary, n_positions=96, n_embd=64, n_layer=2, n_head=4,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
            )
        )  # fmt: skip
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=96, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


def fine_tune(model: Any, tokenizer: Any, documents: list[str], optimizer: str, seed: int, path: Path) -> None:
    draw = random.Random(seed + 100)

    def step(texts: list[str], by: torch.optim.Optimizer) -> None:
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        model(**inputs, labels=labels).loss.backward()
        by.step()
        by.zero_grad()

    before = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        step([" ".join(draw.sample(FILLER, 3)) for _ in range(8)], before)
    chosen: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if optimizer == "sgd":
        chosen = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with dualform.record(model, chosen, path, dtype="float16") as recorder:
        for _ in range(EPOCHS):
            order = list(range(len(documents)))
            draw.shuffle(order)
            for low in range(0, len(order), BATCH):
                ids = order[low : low + BATCH]
                recorder.batch(sample_id=ids)
                step([documents[number] for number in ids], chosen)


class Gradients:
    """Inner products of the gradients of questions and rows, by layer, plain and with curvature between them; and the norms of rows."""

    def __init__(self, dual: Dual, questions: list[tuple[str, str]], tokenizer: Any, documents: int):
        self.dual = dual
        self.layers = [layer for layer in dual.store.manifest.layers if layer.name in dual.layers]
        self.names = [layer.name for layer in self.layers]
        self._loss_mean = loss_mean_of(dual.store, "tokens")
        shape = (len(questions), documents, len(self.layers))
        self.plain, self.cosine, self.whitened = (torch.zeros(shape) for _ in range(3))
        self.cosine_of_all, self.whitened_cosine = (torch.zeros(shape[:2]) for _ in range(2))
        found = segments(dual.store, dual.end_step)
        curvatures = factors(dual.store, self.layers, found, self._loss_mean, None)
        asked = [encode_completion(dual.model(), *question, tokenizer) for question in questions]
        samples = torch.from_numpy(dual.store.rows["sample_id"].to_numpy().copy())
        for segment, curvature in zip(found, curvatures, strict=True):
            model = dual.at(segment.moment).model()
            captured = [run(model, self.layers, one.inputs, 1, {}, one.target.summed).layers for one in asked]
            plain, whitened, norms, whitened_norms = self._of_rows(segment, captured, curvature)
            rows = samples[segment.first_row : segment.end_row]
            self.plain.index_add_(1, rows, plain)
            self.whitened.index_add_(1, rows, whitened)
            self.cosine.index_add_(1, rows, plain / norms.clamp(min=1e-30).sqrt())
            self.cosine_of_all.index_add_(1, rows, plain.sum(2) / norms.sum(1).clamp(min=1e-30).sqrt())
            lengths = whitened_norms.sum(1).clamp(min=1e-30).sqrt()
            self.whitened_cosine.index_add_(1, rows, whitened.sum(2) / lengths)

    def _of_rows(self, segment: Segment, captured: list[Any], curvature: Any) -> tuple[Tensor, ...]:
        """(questions, rows, layers) twice, and squared norms (rows, layers) twice: plain, and with curvature."""
        count = segment.end_row - segment.first_row
        plain, whitened = (torch.zeros(len(captured), count, len(self.layers)) for _ in range(2))
        norms, whitened_norms = (torch.zeros(count, len(self.layers)) for _ in range(2))
        for window in windows(self.dual.store, segment.first_row, segment.end_row, 1 << 40):
            for place, layer in enumerate(self.layers):
                queries = [map_queries(layer, one[layer.name].queries, one[layer.name].gradients) for one in captured]
                for here, piece, keys, errors in pieces_in(self.dual.store, layer, window, torch.float32):
                    assert not isinstance(keys, RowGradients)
                    low = window.begin - segment.first_row + here.start
                    rows = slice(low, low + piece.rows)
                    divisor = piece.loss_divisors(self._loss_mean, torch.float32)
                    for number, one_map in enumerate(linear_maps(layer)):
                        own = one_map.key_side(keys), one_map.error_side(keys, errors)
                        norms[rows, place] += _squared_norms(one_map, *own, piece.positions) * divisor**2
                        known = curvature[layer.name].maps[number]
                        lengths = _whitened_norms(one_map, *own, piece.positions, known)
                        whitened_norms[rows, place] += lengths * divisor**2
                        for question, maps in enumerate(queries):
                            by = plain_products(maps[number])
                            along = by.of_rows(slice(0, 1), *own, piece.positions)[0] * divisor
                            plain[question, rows, place] -= along
                            by = whitened_products(maps[number], known, DAMPING)
                            along = by.of_rows(slice(0, 1), *own, piece.positions)[0] * divisor
                            whitened[question, rows, place] += along
        return plain, whitened, norms, whitened_norms


def _squared_norms(one_map: Any, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
    """‖Σ over positions of error ⊗ key‖² of each row, (rows,)."""
    rows = len(errors) // positions
    flat = errors.reshape(rows, positions, -1)
    if one_map.is_one_hot:
        numbers = keys.reshape(rows, positions)
        same = (numbers[:, :, None] == numbers[:, None]).float()
    else:
        vectors = keys.reshape(rows, positions, keys.shape[1] * keys.shape[2])
        same = vectors @ vectors.transpose(1, 2) + one_map.constant**2
    return ((flat @ flat.transpose(1, 2)) * same).sum((1, 2))


def _whitened_norms(one_map: Any, keys: Tensor, errors: Tensor, positions: int, known: Factors) -> Tensor:
    """The same with the inverse curvature in between, (rows,)."""
    rows = len(errors) // positions

    def by_row(vectors: Tensor) -> Tensor:
        return vectors.reshape(rows, positions, vectors.shape[1] * vectors.shape[2])

    def inner(vectors: Tensor, curvature: Tensor) -> Tensor:
        inverse = torch.linalg.inv(damped(curvature, DAMPING))
        solved = torch.einsum("ngd,gde->nge", vectors.double(), inverse)
        return by_row(vectors.double()) @ by_row(solved).transpose(1, 2)

    if one_map.is_one_hot:
        numbers = keys.reshape(rows, positions).clamp(min=0)
        weights = 1 / (known.keys + DAMPING * known.keys.mean())
        same = (numbers[:, :, None] == numbers[:, None]) * weights[numbers][:, None]
    else:
        same = inner(one_map.with_constant(keys)[..., : known.keys.shape[1]], known.keys)
    return (inner(errors, known.errors) * same).sum((1, 2)).float() / known.positions


def bm25(documents: list[str], questions: list[tuple[str, str]]) -> Tensor:
    import bm25s

    def words(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    index = bm25s.BM25(method="lucene")
    index.index([words(text) for text in documents], show_progress=False)
    return torch.tensor(np.stack([index.get_scores(words("".join(question))) for question in questions]))


def contributions(dual: Dual, questions: list[tuple[str, str]], tokenizer: Any, documents: int) -> Tensor:
    scores = torch.zeros(len(questions), documents, dtype=torch.float64)
    for number, question in enumerate(questions):
        found = dual.sources(*question, tokenizer=tokenizer, k=documents, method="contribution").frame
        scores[number, found["sample_id"].to_list()] = torch.from_numpy(found["contribution"].to_numpy().copy())
    return scores


def ranks(scores: Tensor, right: list[int]) -> list[int]:
    own = scores.gather(1, torch.tensor(right)[:, None])
    return [int(rank) for rank in (scores > own).sum(1) + 1]


def _is_late(layer: Layer) -> bool:
    return ".1." in layer.name or layer.name == "lm_head"


def measure(kind: str, optimizer: str, seed: int, with_contributions: bool) -> dict[str, list[int]]:
    documents, questions, right = corpus(seed)
    tokenizer = make_tokenizer([*documents, *FILLER])
    model = make_model(kind, len(tokenizer), seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "run"
        fine_tune(model, tokenizer, documents, optimizer, seed, path)
        dual = dualform.open(path, model)
        found = Gradients(dual, questions, tokenizer, len(documents))
        late = [place for place, layer in enumerate(found.layers) if _is_late(layer)]
        head = [found.names.index("lm_head")]
        scores = {
            "with curvature (the default)": found.whitened.sum(2),
            "with curvature, cosine": found.whitened_cosine,
            "with curvature, last block and head": found.whitened[:, :, late].sum(2),
            "with curvature, head": found.whitened[:, :, head].sum(2),
            "inner products": found.plain.sum(2),
            "inner products, last block and head": found.plain[:, :, late].sum(2),
            "inner products, head": found.plain[:, :, head].sum(2),
            "cosine": found.cosine_of_all,
            "cosine of each layer": found.cosine.sum(2),
            "BM25": bm25(documents, questions),
        }
        if with_contributions:
            scores["contribution"] = contributions(dual, questions, tokenizer, len(documents))
    return {name: ranks(one, right) for name, one in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--contribution", action="store_true", help="also by contributions, which replay AdamW for each question"
    )
    asked = parser.parse_args()
    every: dict[str, list[int]] = {}
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        for name, found in measure(asked.model, asked.optimizer, seed, asked.contribution).items():
            every.setdefault(name, []).extend(found)
    table = {
        name: {
            "first": sum(rank == 1 for rank in found),
            "of": len(found),
            "mean rank": round(float(np.mean(found)), 2),
        }
        for name, found in every.items()
    }
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    seeds = f"seeds {asked.first_seed} to {asked.first_seed + asked.seeds - 1}"
    known[f"{asked.model}, {asked.optimizer}, {seeds}"] = table
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    for name, line in table.items():
        print(f"{name:40} first {line['first']} of {line['of']}, mean rank {line['mean rank']}")


if __name__ == "__main__":
    main()
