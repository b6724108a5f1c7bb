"""A prompt and its completion as inputs of a language model, with the log-probability of each token as the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QuestionError
from dualform.query.forward import output_of
from dualform.query.targets import (
    IGNORED,
    CompletionTokens,
    described,
    is_encoder_decoder,
    logits_of,
    predicts_next_token,
)

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | Tensor | Mapping[str, Any]
"""A text, chat messages, tokens, or what a tokenizer gives."""


@dataclass(frozen=True)
class Completion:
    """One prompt with its completion."""

    prompt: str
    tokens: list[str]
    """The tokens of the completion, as text."""
    log_probabilities: list[float]
    """Of each token, as the trained model has them."""
    inputs: Any
    """For the model."""
    target: CompletionTokens


def encode_completion(model: nn.Module, prompt: Prompt, completion: Any, tokenizer: Any) -> Completion:
    """Return a prompt and its completion as inputs of a model. completion: None for the likeliest next token."""
    is_next = predicts_next_token(model)
    if not is_next and not is_encoder_decoder(model):
        raise QuestionError(
            "a masked language model completes no prompt. Give the whole text as inputs, with the masked tokens in `labels`: "
            'influence(inputs, target="completion").'
        )
    before = _prompt_tokens(prompt, tokenizer)
    if not before:
        raise QuestionError("the prompt is empty: expected at least one token.")
    if completion is None:
        after = [_likeliest_next_token(model, before, is_next)]
    else:
        after = _completion_tokens(prompt, before, completion, tokenizer)
    if not after:
        raise QuestionError("the completion is empty: expected at least one token.")
    inputs, labels = _arranged(before, after, is_next)
    target = CompletionTokens(labels, is_next)
    with torch.no_grad():
        log_probabilities = target(output_of(model, inputs))[0].tolist()
    shown = prompt if isinstance(prompt, str) else _decoded(before, tokenizer)
    tokens = [_decoded([token], tokenizer) for token in after]
    return Completion(shown, tokens, log_probabilities, inputs, target)


def _arranged(before: list[int], after: list[int], is_next: bool) -> tuple[Any, Tensor]:
    """Return inputs and labels: one sequence, or, for an encoder-decoder, the prompt beside the completion."""
    if is_next:
        # The first argument of every causal language model, whatever its name is
        inputs = torch.tensor([before + after])
        ignored = [IGNORED] * len(before)
        return inputs, torch.tensor([ignored + after])
    labels = torch.tensor([after])
    return {"input_ids": torch.tensor([before]), "labels": labels}, labels


def _likeliest_next_token(model: nn.Module, before: list[int], is_next: bool) -> int:
    # The decoder of an encoder-decoder gets all labels but the last: of one label, only its first token
    inputs, _ = _arranged(before, [] if is_next else [0], is_next)
    with torch.no_grad():
        logits = logits_of(output_of(model, inputs))
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise QuestionError(f"the model's output is {described(logits)}; expected (1, positions, vocabulary).")
    return int(logits[0, -1].argmax())


def _prompt_tokens(prompt: Prompt, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        tokens = _needed(tokenizer)(prompt)["input_ids"]
        return _without_end(tokens, prompt, tokenizer)
    if isinstance(prompt, Mapping):
        return _token_list(prompt["input_ids"])
    if not isinstance(prompt, Tensor) and prompt and isinstance(prompt[0], Mapping):
        rendered = _needed(tokenizer).apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
        return _token_list(rendered["input_ids"])
    return _token_list(prompt)


def _completion_tokens(prompt: Prompt, before: list[int], completion: Any, tokenizer: Any) -> list[int]:
    if not isinstance(completion, str):
        return _token_list(completion)
    if isinstance(prompt, str):
        # Together, as in training; unless a token reaches across the border
        together = _needed(tokenizer)(prompt + completion)["input_ids"]
        together = _without_end(together, completion, tokenizer)
        if together[: len(before)] == before:
            return together[len(before) :]
    alone = _needed(tokenizer)(completion, add_special_tokens=False)
    return _token_list(alone["input_ids"])


def _without_end(tokens: list[int], text: str, tokenizer: Any) -> list[int]:
    """Leave out the end-of-text token that some tokenizers add: the text goes on."""
    end = getattr(tokenizer, "eos_token_id", None)
    has_end = end is not None and tokens[-1:] == [end]
    if has_end and not text.endswith(tokenizer.eos_token):
        return tokens[:-1]
    return list(tokens)


def _token_list(given: Any) -> list[int]:
    tokens = torch.as_tensor(given)
    if tokens.dim() == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if tokens.dim() != 1 or (tokens.numel() and tokens.is_floating_point()):
        raise QuestionError(f"tokens are {described(tokens)}; expected the whole numbers of one example, (tokens,).")
    return [int(token) for token in tokens]


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise QuestionError("a text needs the tokenizer that the model was trained with: tokenizer=….")
    return tokenizer


def _decoded(tokens: list[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return str(tokenizer.decode(tokens))
