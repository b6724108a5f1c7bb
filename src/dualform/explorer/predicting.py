"""From an address to an input of the model, and from an input to what the model says."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.errors import QuestionError
from dualform.explorer.forms import Example, Examples, Named, Prediction, Unit
from dualform.explorer.inputs import Inputs, example
from dualform.explorer.subject import Subject
from dualform.query.forward import output_of
from dualform.query.targets import logits_of

GRID = 32
"""A drawing has so many fields on each side, and 16 levels of ink."""
MOST_TESTS = 100_000
"""So many test examples are answered, to be filtered by right and wrong."""
BATCH = 500
SHOWN = 1000
"""So many outputs of a model are listed."""


class Predictions:
    """What the model says."""

    def __init__(self, subject: Subject):
        self._subject = subject
        self.test = subject.test

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, from the recording."""
        return self._subject.dual.model()

    @cached_property
    def last_layer(self) -> str | None:
        """The layer whose output is the model's: the last one, unless the model goes on after it (layers= left the rest out)."""
        last = self._subject.dual.layers[-1] if self._subject.dual.layers else None
        if last is None or not len(self.test) or last not in dict(self.model.named_modules()):
            return last
        given: list[Any] = []
        handle = self.model.get_submodule(last).register_forward_hook(lambda _, args, output: given.append(output))
        try:
            with torch.no_grad():
                made = logits_of(output_of(self.model, self.inputs("test:0")))
        finally:
            handle.remove()
        known = [one for one in given if isinstance(one, Tensor) and isinstance(made, Tensor)]
        return last if not known or any(torch.equal(one.flatten(), made.flatten()) for one in known) else None

    def inputs(self, address: str) -> Inputs:
        """One input as a batch of one: "test:7", or "draw:" and 1024 hexadecimal digits of ink."""
        kind, _, rest = address.partition(":")
        if kind == "test" and re.fullmatch(r"[0-9]{1,9}", rest):
            part, place = self.test.place(int(rest))
            return part.batch([place])
        if kind == "draw" and self._subject.draw is not None:
            if re.fullmatch(rf"[0-9a-f]{{{GRID * GRID}}}", rest) is None:
                raise QuestionError(f"a drawing is {GRID * GRID} hexadecimal digits, 16 levels of ink, line by line.")
            ink = torch.tensor([int(digit, 16) for digit in rest]).reshape(GRID, GRID) / 15
            return self._subject.draw(ink).unsqueeze(0)
        raise QuestionError(
            'an input is "test:" and a number'
            + (', or "draw:" and a drawing.' if self._subject.draw is not None else ".")
        )

    def label(self, address: str) -> Named | None:
        """The label of a test example."""
        if not address.startswith("test:"):
            return None
        part, place = self.test.place(int(address.removeprefix("test:")))
        label = part.label(place)
        return None if label is None else self._subject.named(label, of=part.name)

    def dataset(self, address: str) -> str:
        """The name of a test example's dataset, if there are several."""
        return self.test.place(int(address.removeprefix("test:")))[0].name if address.startswith("test:") else ""

    def title(self, address: str) -> str:
        """How an input is called."""
        if not address.startswith("test:"):
            return "your drawing"
        part, place = self.test.place(int(address.removeprefix("test:")))
        return f"{part.name} test example {place}".strip()

    def logits(self, address: str, model: nn.Module | None = None) -> Tensor:
        """(units,): the model's output for one input."""
        with torch.no_grad():
            output = output_of(self.model if model is None else model, self.inputs(address))
        return self._classes(output, 1)[0]

    def prediction(self, address: str, model: nn.Module | None = None) -> Prediction:
        """What a model says about an input; default: the trained one."""
        logits = self.logits(address, model)
        probabilities = logits.double().softmax(0)
        order, dataset = logits.argsort(descending=True, stable=True)[:SHOWN].tolist(), self.dataset(address)
        units = [
            Unit(
                unit=unit,
                name=self._subject.name(unit, dataset),
                colour=unit,
                logit=float(logits[unit]),
                probability=float(probabilities[unit]),
            )
            for unit in order
        ]
        sample = example(self.inputs(address), 0)
        return Prediction(
            input=address,
            title=self.title(address),
            shown=self._subject.show_input(sample),
            label=self.label(address),
            answer=order[0],
            units=units,
        )

    def _classes(self, output: Any, rows: int) -> Tensor:
        logits = logits_of(output)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != rows:
            raise QuestionError("the model does not give one row of numbers for each input, so there are no classes.")
        return logits.detach().cpu()

    # The test set

    @cached_property
    def labels(self) -> list[Any]:
        """The label of each test example."""
        return [part.label(place) for part, places in self.test.batches(BATCH, MOST_TESTS) for place in places]

    @cached_property
    def expected(self) -> list[int | None]:
        """The output that stands for the label of each test example; None where there is none."""
        names = [part.name for part, places in self.test.batches(BATCH, MOST_TESTS) for _ in places]
        return [self._subject.output(label, of=name) for label, name in zip(self.labels, names, strict=True)]

    @cached_property
    def answers(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(tests,): the model's answer to each test example, and its probability."""
        return self.answers_of(self.model, min(len(self.test), MOST_TESTS))

    def answers_of(self, model: nn.Module, end: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """A model's answers to the first test examples, and their probabilities."""
        answers, sure = [], []
        for part, places in self.test.batches(BATCH, end):
            with torch.no_grad():
                output = self._classes(output_of(model, part.batch(list(places))), len(places))
            best = output.double().softmax(1).max(1)
            answers.append(best.indices.numpy())
            sure.append(best.values.numpy())
        return (np.concatenate(answers), np.concatenate(sure)) if answers else (np.zeros(0, int), np.zeros(0))

    def answers_at(self, model: nn.Module, numbers: list[int]) -> np.ndarray[Any, Any]:
        """A model's answers to some test examples."""
        placed = [self.test.place(number) for number in numbers]
        answers: list[int] = []
        for part in self.test.parts:
            places = [place for one, place in placed if one is part]
            for low in range(0, len(places), BATCH):
                some = places[low : low + BATCH]
                with torch.no_grad():
                    answers += self._classes(output_of(model, part.batch(some)), len(some)).argmax(1).tolist()
        return np.array(answers, dtype=int)

    @cached_property
    def right(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(tests,): whether each answer is the label's output."""
        answers, _ = self.answers
        return np.array(
            [expected == answer for expected, answer in zip(self.expected, answers.tolist(), strict=True)], dtype=bool
        )

    @property
    def accuracy(self) -> float | None:
        """The share of right answers, if test examples have labels."""
        known = [expected is not None for expected in self.expected]
        return float(self.right[known].mean()) if any(known) else None

    def example(self, number: int) -> Example:
        """A test example with its label and answer."""
        part, place = self.test.place(number)
        answers, sure = self.answers
        label = self.labels[number]
        return Example(
            input=f"test:{number}",
            title=f"{part.name} test {place}".strip(),
            shown=self._subject.show_input(part.input(place)),
            label=None if label is None else self._subject.named(label, of=part.name),
            answer=self._subject.named(int(answers[number]), of=part.name),
            right=None if self.expected[number] is None else bool(self.right[number]),
            probability=float(sure[number]),
        )

    def examples(
        self,
        *,
        label: str = "",
        right: bool | None = None,
        number: int | None = None,
        part: str = "",
        shuffle: int | None = None,
        offset: int = 0,
        limit: int = 60,
    ) -> Examples:
        """Test examples that fit, in their order or shuffled by a seed."""
        count = min(len(self.test), MOST_TESTS)
        fits = np.ones(count, bool)
        if label:
            fits &= np.array([str(one) == label for one in self.labels], dtype=bool)
        if right is not None:
            fits &= self.right == right
        if part:
            names = np.repeat(
                [one.name for one in self.test.parts] or [""], [len(one) for one in self.test.parts] or [0]
            )
            fits &= names[:count] == part
        if number is not None:
            places = np.concatenate([np.arange(len(one)) for one in self.test.parts] or [np.zeros(0, int)])[:count]
            fits &= places == number
        found = np.flatnonzero(fits)
        if shuffle is not None:
            found = np.random.default_rng(shuffle).permutation(found)
        some = found[offset : offset + limit].tolist()
        return Examples(found=len(found), offset=offset, examples=[self.example(one) for one in some])

    @property
    def kind(self) -> str:
        """How inputs are shown."""
        if not len(self.test):
            return "none"
        part, place = self.test.place(0)
        return self._subject.show_input(part.input(place)).kind
