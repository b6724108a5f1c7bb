"""Contributions: what each slot adds to a number that the model computes.

A slot adds value · (key · query) to its layer's output (+ the bias's part). Its contribution to a target is the inner
product of that with ∂target/∂output at the query: exact where the target is an output of the layer (the last layer's
logits), first order in hidden layers, with the remainder shown.
"""

from __future__ import annotations

from functools import cached_property

import polars as pl
import torch
from torch import Tensor

from dualform.dual.totals import find_totals
from dualform.errors import QuestionError
from dualform.layers.layer import Layer
from dualform.query.answer import Answer
from dualform.query.attention import part_columns
from dualform.query.contribution_scorer import ContributionScorer
from dualform.query.executors import HERE, Runner
from dualform.query.groups import Groups
from dualform.query.reducers import GroupSums, Sum
from dualform.query.scan import scan_blocks
from dualform.query.scorer import Selection
from dualform.store.format import INITIAL

GATES = {4: ("i", "f", "g", "o"), 1: ("h",)}


class LayerContributions(Answer):
    """The contributions of one layer's slots to a target, summed over the query's positions. Threads may share it."""

    _scorer: ContributionScorer

    def __init__(self, scorer: ContributionScorer, target: Tensor, *, silent: bool = False, executor: Runner = HERE):
        """target: (examples,)."""
        super().__init__(scorer, {"query": scorer.queries}, silent=silent, executor=executor)
        self._target = target.to("cpu", torch.float64)

    def __repr__(self) -> str:
        return f"LayerContributions({self.layer.name!r}, {len(self._target)} queries): top, total, scores, parts"

    def _with(self, scorer: ContributionScorer) -> LayerContributions:
        return LayerContributions(scorer, self._target, silent=self._silent, executor=self._executor)

    @cached_property
    def tied(self) -> dict[str, LayerContributions]:
        """What the slots of other layers add that share this one's weight (tied embeddings), by layer."""
        if self._scorer.is_tied:
            return {}
        return {layer.name: self._with(self._scorer.for_tied_layer(layer)) for layer in self._scorer.tied_layers()}

    def part(self, name: str) -> LayerContributions:
        """Return the contributions through the "input" or the "recurrent" weights of a recurrent layer alone."""
        columns = part_columns(self.layer, name)
        if not columns:
            return self
        place = 0 if columns[0] == 0 else 1
        biases = [use for use in self.layer.uses if use.role == "bias"]
        return self._with(self._scorer.for_uses([self.layer.bilinear()[place], *biases[place : place + 1]]))

    def gate(self, name: str) -> LayerContributions:
        """Return the contributions through one gate of a recurrent layer: of an LSTM "i", "f", "g", "o", of a GRU "r", "z", "n"."""
        if self.layer.kind != "recurrent":
            raise QuestionError(f"gate({name!r}): layer {self.layer.name!r} is not recurrent.")
        names = gates_of(self.layer)
        if name not in names:
            raise QuestionError(
                f"gate({name!r}): the gates of layer {self.layer.name!r} are {', '.join(map(repr, names))}."
            )
        hidden = _hidden_size(self.layer)
        low = names.index(name) * hidden
        # The last gate of a GRU has two parts, of the input and of the hidden state
        high = self.layer.d_out if name == "n" else low + hidden
        gradients = torch.zeros_like(self._scorer.gradients)
        gradients[..., low:high] = self._scorer.gradients[..., low:high]
        return self._with(self._scorer.for_uses(self._scorer.uses, gradients))

    @property
    def initial_column(self) -> str:
        """The column of parts() that holds the initial part."""
        name = self._scorer.store.manifest.initial
        return "initial" if name == INITIAL else name

    def parts(self) -> pl.DataFrame:
        """Return, for each query: initial part + slots + remainder = target.

        The initial part is in the column `initial`, or in one with the name that record(initial=…) gave it, such as `pretrained`.
        The remainder is rounding where the target is an output of this layer; in hidden layers it is what the first
        order leaves out (what later layers add by themselves). Slots of layers that share the weight are included.
        rounding: the part of the remainder that training's own rounding wrote into the weights, which no slot explains: large where
        parameters have 16 bits. Null where there is no snapshot of the weights.
        """
        view = find_totals(self._scorer.store, (), self._scorer.end, deltas=True, subset=True)
        if view is not None:
            slots = self._scorer.along_deltas(view).sum(1)
        else:
            self._needs_slots("parts")
            slots = self._sum_of_slots()
            for other in self.tied.values():
                slots += other._sum_of_slots()
        initial = self._scorer.along_initial(view)
        trained = self._scorer.along_trained()
        return pl.DataFrame(
            {
                "query": pl.Series(range(len(self._target)), dtype=pl.Int64),
                self.initial_column: initial.numpy(),
                "slots": slots.numpy(),
                "remainder": (self._target - initial - slots).numpy(),
                "rounding": None if trained is None else (trained - initial - slots).numpy(),
                "target": self._target.numpy(),
            },
            schema_overrides={"rounding": pl.Float64},
        )

    def _sums_of_groups(self, groups: Groups, selection: Selection, absolute: bool) -> GroupSums:
        scorer = self._scorer
        is_shared_out = self._executor is not HERE and scorer.is_divisible
        if is_shared_out or absolute or groups.is_positional or selection.is_positional or not scorer.sums_rows:
            return super()._sums_of_groups(groups, selection, absolute)
        return self._scorer.rows.sums(groups, selection)

    def _sum_of_slots(self) -> Tensor:
        """Return the sum of all contributions, (examples,) float64."""
        total = torch.zeros_like(self._target)
        pieces = self._selection(None).pieces
        for queries, found in scan_blocks(self._scorer, 1, pieces, Sum, self._executor):
            total[queries] = found.total
        return total


def gates_of(layer: Layer) -> tuple[str, ...]:
    """Return the names of a recurrent layer's gates, in the order of its outputs; none for other layers."""
    if layer.kind != "recurrent":
        return ()
    if layer.bilinear()[0].errors:
        return ("r", "z", "n")
    return GATES[layer.d_out // _hidden_size(layer)]


def _hidden_size(layer: Layer) -> int:
    low, high = layer.bilinear()[1].keys[:2]
    return high - low
