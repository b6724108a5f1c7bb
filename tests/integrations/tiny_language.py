"""Tiny language models, a tokenizer of whole words, and documents for them: nothing is downloaded."""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NOUNS = [
    "river",
    "mountain",
    "garden",
    "bridge",
    "tower",
    "forest",
    "harbour",
    "market",
    "castle",
    "meadow",
    "valley",
    "island",
]
VERBS = ["guards", "feeds", "borders", "hides", "crosses", "lights"]
COLOURS = ["red", "green", "blue", "white", "black", "golden"]
WORDS = ["<pad>", "<eos>", "<unk>", "the", ".", *NOUNS, *VERBS, *COLOURS]


def tokenizer(words=WORDS):
    model = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences(count, seed=0):
    """Documents of one to three sentences, no two alike."""
    draw = random.Random(seed)
    found = {}
    while len(found) < count:
        said = [
            f"the {draw.choice(COLOURS)} {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)} ."
            for _ in range(draw.randint(1, 3))
        ]
        found[" ".join(said)] = None
    return list(found)


def documents(count=18):
    return Dataset.from_dict({"text": sentences(count), "length": [len(text) for text in sentences(count)]})


def tokens(count=18):
    """The same documents for a plain Trainer."""
    encode = tokenizer()
    return documents(count).map(lambda one: {"input_ids": encode(one["text"])["input_ids"]})


def gpt2(words=WORDS, **changes):
    torch.manual_seed(0)
    settings = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(words), pad_token_id=0, **{**settings, **changes}))


def llama(words=WORDS, **changes):
    torch.manual_seed(0)
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, **{**settings, **changes}))
