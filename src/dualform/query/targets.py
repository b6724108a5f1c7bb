"""The target of a question: a number that the model computes for each example. There are several ways to name it.

| target | contributions | influence |
|---|---|---|
| None, a class, a class for each example | the logit of that class | its margin, log(p / (1 − p)) |
| "next token", a token as text | the logit of that token after the last position | its margin there |
| "completion" | the log-probability of the tokens in `labels` | the same |
| a function of the model's output | what it gives | the same |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QuestionError

Target = int | str | Sequence[int] | Tensor | Callable[[Any], Tensor] | None
TargetFunction = Callable[[Any], Tensor]
"""From a model's output to one number for each example, (examples,); of `CompletionTokens`, (examples, tokens)."""
NEXT_TOKEN = "next token"
COMPLETION = "completion"
IGNORED = -100
"""The label of positions that do not count, as in PyTorch and Hugging Face."""


def logits_of(output: Any) -> Any:
    """Return the logits in the output of a model.

    In outputs of Hugging Face and in dictionaries, that is "logits"; in a tuple, the first batch of vectors. Any other output is returned
    unchanged.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    if isinstance(output, tuple):
        return next((one for one in output if isinstance(one, Tensor) and one.dim() > 1), output)
    return output


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the configuration of a model says so, as in Hugging Face."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def predicts_next_token(model: nn.Module) -> bool:
    """Whether the logits at a position are for the token after it: not in encoder-decoders and masked language models."""
    if is_encoder_decoder(model):
        return False
    return not any("MaskedLM" in type(module).__name__ for module in model.modules())


@dataclass(frozen=True)
class CompletionTokens:
    """The log-probability of each token of a completion; of several examples, each has as many."""

    labels: Tensor
    """(examples, positions): the tokens, and IGNORED everywhere else."""
    is_next: bool
    """Whether the logits at a position are for the token after it."""

    def __call__(self, output: Any) -> Tensor:
        """Return log-probabilities, (examples, tokens)."""
        log_probabilities, asked = self._by_position(output)
        return log_probabilities[asked].reshape(len(log_probabilities), -1)

    def summed(self, output: Any) -> Tensor:
        """Return the log-probability of each example's completion, (examples,)."""
        log_probabilities, _ = self._by_position(output)
        return log_probabilities.sum(1)

    def _by_position(self, output: Any) -> tuple[Tensor, Tensor]:
        """Return log-probabilities, 0 at positions that do not count, and which positions count, (examples, positions) each."""
        logits = logits_of(output)
        labels = self.labels
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != labels.shape:
            raise QuestionError(
                f"the model's output is {described(logits)}; for a completion it must be {(*labels.shape, 'vocabulary')}."
            )
        labels = labels.to(logits.device)
        if self.is_next:
            logits = logits[:, :-1]
            labels = labels[:, 1:]
        asked = labels != IGNORED
        tokens = labels.where(asked, 0).unsqueeze(2)
        log_probabilities = logits.log_softmax(2).gather(2, tokens)[:, :, 0]
        return log_probabilities.where(asked, 0), asked


@dataclass(frozen=True)
class TargetReader:
    """Turns what a user calls a target into a function of the model's output."""

    inputs: Any
    rows: int
    is_next: bool = True
    """Whether the model predicts next tokens."""
    tokenizer: Any = None

    def logit(self, target: Target) -> TargetFunction:
        """Return the logit of a class or token as a function of the output."""
        ready = self._ready(target)
        if ready is not None:
            return ready
        return lambda output: self._chosen(self._units(output, target), target)[0]

    def margin(self, target: Target, trained: Callable[[], Any]) -> TargetFunction:
        """Return the margin of a class or token as a function of the output: its logit less the logsumexp of all others, log(p / (1 − p)).

        trained: gives the output of the trained model. None and "next token" mean its answer, whichever model's margin is then taken.
        """
        ready = self._ready(target)
        if ready is not None:
            return ready
        _, numbers = self._chosen(self._units(trained(), target), target)

        def margin(output: Any) -> Tensor:
            units = self._units(output, target)
            chosen = torch.nn.functional.one_hot(numbers.long(), units.shape[1]).bool()
            return units[chosen] - units.masked_fill(chosen, -math.inf).logsumexp(1)

        return margin

    def _ready(self, target: Target) -> TargetFunction | None:
        """Return the function that a target is or names, if it is the same for contributions and influence; else None."""
        if isinstance(target, CompletionTokens):
            return target
        if isinstance(target, str) and target == COMPLETION:
            return CompletionTokens(self._labels(), self.is_next).summed
        return self._checked(target) if callable(target) else None

    def _checked(self, function: TargetFunction) -> TargetFunction:
        def checked(output: Any) -> Tensor:
            values = function(output)
            if not isinstance(values, Tensor) or values.shape != (self.rows,):
                raise QuestionError(
                    f"target(output) gave {described(values)}; expected a tensor with one number for each of {self.rows} examples."
                )
            return values

        return checked

    def _labels(self) -> Tensor:
        labels = self.inputs.get("labels") if isinstance(self.inputs, Mapping) else None
        if not isinstance(labels, Tensor):
            raise QuestionError(
                f'target="{COMPLETION}" needs the completion: give inputs as a dictionary with "labels", which are {IGNORED} where nothing '
                f"is asked; or ask dual.sources(prompt=…, completion=…, tokenizer=…)."
            )
        return labels

    def _units(self, output: Any, target: Target) -> Tensor:
        """Return the logits that a target is among, (rows, units)."""
        logits = logits_of(output)
        if isinstance(target, str):
            return self._after_last_token(logits)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != self.rows:
            raise QuestionError(
                f"the model's output is {described(logits)}, not ({self.rows}, units). Say what the target is: a function of the output "
                f'that gives one number for each example, e.g. target=lambda output: output[:, -1, 7]; or, of a language model, "{NEXT_TOKEN}", '
                f'"{COMPLETION}" or a token as text.'
            )
        return logits

    def _after_last_token(self, logits: Any) -> Tensor:
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[0] != self.rows:
            raise QuestionError(
                f"the model's output is {described(logits)}, not ({self.rows}, positions, vocabulary): there is no next token."
            )
        mask = self.inputs.get("attention_mask") if isinstance(self.inputs, Mapping) else None
        if not isinstance(mask, Tensor) or mask.shape != logits.shape[:2]:
            return logits[:, -1]
        places = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask > 0, places, 0).amax(1)  # whichever side is padded
        return logits[torch.arange(self.rows), last]

    def _chosen(self, units: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """Return the logits of the units that a target means, and their numbers, (rows,) each."""
        if target is None or (isinstance(target, str) and target == NEXT_TOKEN):
            numbers = units.detach().argmax(1)
        elif isinstance(target, str):
            numbers = torch.tensor(token_number(target, self.tokenizer)).expand(self.rows)
        else:
            numbers = self._numbers(target, units.shape[1])
        numbers = numbers.to(units.device)
        return units.gather(1, numbers.unsqueeze(1))[:, 0], numbers

    def _numbers(self, target: Any, units: int) -> Tensor:
        numbers = torch.as_tensor(target)
        if numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.shape not in ((), (self.rows,)):
            raise QuestionError(
                f"target={target!r}: expected a unit from 0 to {units - 1}, or one for each of {self.rows} examples."
            )
        if self.rows and not bool(((numbers >= 0) & (numbers < units)).all()):
            raise QuestionError(f"target={target!r}: the output has units 0 to {units - 1}.")
        return numbers.expand(self.rows)


def token_number(text: str, tokenizer: Any) -> int:
    """Return the number of the one token that a text is."""
    if tokenizer is None:
        raise QuestionError(
            f'target={text!r}: a token as text needs the tokenizer: tokenizer=…. Without one: "{NEXT_TOKEN}" or "{COMPLETION}".'
        )
    numbers = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(numbers) != 1:
        parts = ", ".join(repr(tokenizer.decode([number])) for number in numbers)
        raise QuestionError(
            f"target={text!r} is {len(numbers)} tokens ({parts}); expected one. A blank before a word belongs to its token. "
            f"For several: dual.sources(prompt=…, completion={text!r}, tokenizer=…)."
        )
    return int(numbers[0])


def described(value: Any) -> str:
    """Return the shape of a tensor, or the name of another type."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
