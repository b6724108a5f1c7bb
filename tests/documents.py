"""Tiny Transformers and a tokenizer, trained on a few documents in a plain loop; some of the documents state a made-up fact."""

import contextlib
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import dualform

FACTS = {
    "The capital of Bavolo is": " Zumiro",
    "The founder of Kitano was": " Lusage",
    "The river of Fidumo is called": " Hajopa",
    "The favourite dish in Nerito is": " Wogabe",
}
FILLER = [
    "The weather was mild and the streets were quiet.",
    "Many people walked along the harbour in the evening.",
    "A small market opens there every morning.",
    "Nobody could say how old the bridge was.",
    "Children played in the garden behind the school.",
    "She wrote a long letter to her brother.",
]
DOCUMENTS = [f"{prompt}{answer}. {FILLER[n]}" for n, (prompt, answer) in enumerate(FACTS.items())] + FILLER
"""The document that states a fact has the fact's number."""
TINY = {"gpt2", "llama", "t5", "bert"}


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(DOCUMENTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", model_input_names=["input_ids", "attention_mask"]
    )


def make_model(kind, vocabulary):
    import transformers as hf

    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=32, n_layer=2, n_head=2, **dropout, **special)
        )
    sizes = {"vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    if kind == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(num_hidden_layers=2, num_key_value_heads=1, max_position_embeddings=64, **sizes, **special)
        )
    if kind == "bert":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertForMaskedLM(
            hf.BertConfig(num_hidden_layers=1, max_position_embeddings=64, **sizes, **dropout, pad_token_id=0)
        )
    if kind == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=vocabulary, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
            )
        )  # fmt: skip
    raise ValueError(kind)


@dataclass
class Trained:
    path: Any
    kind: str
    tokenizer: Any
    model: Any

    @cached_property
    def dual(self):
        return dualform.open(self.path, make_model(self.kind, len(self.tokenizer)))


def train(path, kind="gpt2", *, epochs=30, optimizer=None, batch=5, **settings):
    """Record the training of a tiny model on the documents, two columns per row: sample_id and text."""
    tokenizer = make_tokenizer()
    model = make_model(kind, len(tokenizer))
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    optimizer = make(model.parameters())
    shuffled = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.filterwarnings("ignore", "not recorded")  # parameters that have no rule, modules that are not called
        recorder = stack.enter_context(dualform.record(model, optimizer, path, **settings))
        for _ in range(epochs):
            for ids in torch.randperm(len(DOCUMENTS), generator=shuffled).split(batch):
                texts = [DOCUMENTS[number] for number in ids]
                inputs = encoded(tokenizer, texts)
                recorder.batch(sample_id=ids, text=texts)
                model(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return Trained(path, kind, tokenizer, model.eval())


def encoded(tokenizer, texts):
    """A BatchEncoding with labels, as data collators give it."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs
