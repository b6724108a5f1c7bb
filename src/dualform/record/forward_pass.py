"""One forward pass of a recorded model: whose rows it runs, and where they are in the input of each layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from dualform.errors import AxisError, BatchError, DualformError
from dualform.layers.found import Arguments
from dualform.layers.row_proof import Proof, Proofs, Told, decision_of, prove, shape_class
from dualform.layers.rows import FIRST, Decision, Layout, Lead, by_length, shape_text, tensors_in
from dualform.record.columns import Batch
from dualform.store.format import RowEvidence

ON_UNCLEAR_ROWS = ("ask", "leave out")
NOT_CALLED = "it was not called when the model ran with permuted rows"


@dataclass(eq=False, slots=True)
class ForwardPass:
    """A forward pass, from its outermost module on."""

    module: nn.Module
    batch: Batch | None
    shapes: dict[str, set[Hashable]] = field(default_factory=dict)
    """By module: what its inputs look like, apart from their exact sizes."""
    calls: dict[str, int] = field(default_factory=dict)
    """By module: how often it has been called."""
    proof: Proof = field(default_factory=Proof)
    """Where the rows are in each call of each layer."""
    problem: DualformError | None = None
    """Why its slots cannot be named."""

    def called(self, module: str, key: Tensor) -> int:
        """A recorded module was called; gives the number of the call."""
        number = self.calls.get(module, 0)
        self.calls[module] = number + 1
        if self.batch is not None:
            self.shapes.setdefault(module, set()).add(shape_class(key, self.batch.rows))
        return number


class RowFinder:
    """Finds where the rows are in the inputs of layers: by experiment, once for each kind of forward pass."""

    def __init__(
        self,
        told: Told,
        names: Mapping[nn.Module, str],
        *,
        check: bool,
        on_unclear: str,
    ):
        """names: of all modules that may be called from outside. check: whether experiments may be made."""
        self._told, self._names = told, names
        self._check, self._on_unclear = check, on_unclear
        self.step = 0
        """The step that is under way."""
        self._proofs = Proofs()
        self.recorded: dict[str, nn.Module] = {}
        """The recorded modules, by name."""
        self._evidence: dict[str, RowEvidence] = {}
        self._news: dict[str, RowEvidence] = {}

    def begin(self, module: nn.Module, batch: Batch | None) -> ForwardPass:
        """The outermost module is called, with gradients on."""
        if batch is not None:
            batch.uses += 1
        return ForwardPass(module, batch)

    def end(self, forward: ForwardPass, arguments: Arguments) -> None:
        """It has returned: find the rows, if no forward pass of this kind has been seen yet."""
        batch = forward.batch
        if batch is None or batch.rows < 2:
            return
        rows = batch.rows
        proof, is_new = self._proofs.get(
            forward.module, arguments, forward.shapes, rows, lambda: self._prove(forward, arguments, rows)
        )
        if is_new:
            self._write_down(forward, proof)
        forward.proof = proof
        if proof.rows_differ:
            name = self._names.get(forward.module, "")
            forward.problem = _another_row_count(batch, tensors_in(arguments), name)

    def _prove(self, forward: ForwardPass, arguments: Arguments, rows: int) -> Proof:
        if not self._check:
            return Proof(problem="check_rows=False")
        inputs = self._told.axes.get(self._names.get(forward.module, ""))
        told = self._told.with_inputs(inputs)
        return prove(forward.module, arguments, rows, told, self.recorded, forward.calls)

    def layout(
        self, layer: str, forward: ForwardPass | None, call: int | None, rows: int, lead: Lead, axis: int | None
    ) -> Layout:
        """How the input of a layer is read.

        call: its number in the forward pass; None: it was run again in a backward pass (checkpointing). axis: the leading axis of the
        rows, if the module itself names it.
        """
        decision = self._decide(layer, forward, call, rows, lead, axis)
        found = None if decision.where is None else decision.where.layout(lead, rows)
        if found is not None:
            return found
        if self._on_unclear == "leave out":
            return Layout(lead, None)
        raise _unclear(layer, lead, rows, decision)

    def is_first_axis(self, layer: str, forward: ForwardPass | None) -> bool:
        """Whether every call of a layer holds the rows along the first axis of its input, one vector for each."""
        if forward is None or self._told.axes:
            return False
        decisions = forward.proof.decisions.get(layer)
        if decisions is None:
            return not forward.proof.decisions
        return len(decisions) == 1 and decisions[0].where == FIRST

    def _decide(
        self, layer: str, forward: ForwardPass | None, call: int | None, rows: int, lead: Lead, axis: int | None
    ) -> Decision:
        proof = Proof(problem="it was called outside a forward pass") if forward is None else forward.proof
        shown = decision_of(proof.decisions.get(layer, []), call)
        named = self._told.reading(layer, lead, rows, axis)
        if named is not None:
            is_shown = shown.is_proved and shown.where == named
            return Decision(named, "" if is_shown else "batch_axis says so")
        if rows < 2:
            return Decision(FIRST)
        if shown.where is not None:
            return shown
        if layer in proof.decisions:
            return shown
        why = NOT_CALLED if proof.decisions else proof.problem
        return Decision(by_length(lead, rows, axis), why)

    # What verify and info say

    def _write_down(self, forward: ForwardPass, proof: Proof) -> None:
        for module in forward.calls:
            for layer in self._told.layers(module):
                self._add_evidence(layer, proof)

    def _add_evidence(self, layer: str, proof: Proof) -> None:
        decisions = proof.decisions.get(layer, [])
        reasons = [one.why for one in decisions if not one.is_proved]
        if not decisions:
            reasons = [NOT_CALLED if proof.decisions else proof.problem]
            places = ["axis 0 by its length"]
        else:
            places = [str(one.where) if one.where is not None else "not clear" for one in decisions]
        if reasons and self._told.names(layer):
            reasons = ["batch_axis says so"]
        known = self._evidence.get(layer, RowEvidence())
        now = RowEvidence(
            where=known.where or ", ".join(dict.fromkeys(places)),
            proved=self.step if known.proved is None and not reasons else known.proved,
            assumed=self.step if known.assumed is None and reasons else known.assumed,
            why=known.why or "".join(reasons[:1]),
        )
        if now != known:
            self._evidence[layer] = self._news[layer] = now

    def take_news(self) -> dict[str, RowEvidence]:
        """What has been found out since this was last asked."""
        news, self._news = self._news, {}
        return news


def _another_row_count(batch: Batch, tensors: Sequence[Tensor], module: str) -> BatchError:
    called = f"the module {module!r}" if module else "the model"
    axis = f"{{{module!r}: 1}}" if module else "1"
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
    reused = f" (the {batch.uses}. forward pass since that call)" if batch.uses > 1 else ""
    return BatchError(
        f"batch() announced {batch.rows} rows, but {called} was given tensors of shapes {shapes}{reused}, whose first axis is not "
        f"{batch.rows} long. Call recorder.batch() before each forward pass, with gradient accumulation before each micro-batch, with "
        f"one entry for each of its samples. If the rows are along another axis (sequence first), say so: record(…, batch_axis={axis})."
    )


def _unclear(layer: str, lead: Lead, rows: int, decision: Decision) -> AxisError:
    if not lead:
        return AxisError(
            f"layer {layer!r} got a single vector, but batch() announced {rows} rows. Call recorder.batch() for the "
            f"sample that runs through it, or leave the layer out with exclude=."
        )
    why = f" ({decision.why})" if decision.why else ""
    if len(lead) == 1 and lead[0] > rows > 0 and lead[0] % rows == 0:
        positions = lead[0] // rows
        return AxisError(
            f"layer {layer!r} got {lead[0]} vectors, but batch() announced {rows} rows, and it is not clear whose they are{why}. "
            f"If there are {lead[0]} samples, give batch() one entry for each. If each row has {positions} positions, say how they "
            f"were flattened: batch_axis={{{layer!r}: 0}} if each row's positions stand together (x.reshape(rows * positions, …)), "
            f"batch_axis={{{layer!r}: 1}} if the rows alternate (sequence first)."
        )
    return AxisError(
        f"layer {layer!r} got an input of shape {shape_text(lead)}, and batch() announced {rows} rows: it is not clear which of its "
        f"vectors belong to which row{why}. Give batch() one entry per sample of this forward pass; name the axis of the rows, "
        f"batch_axis={{{layer!r}: 0}}; leave the layer out, exclude=[{layer!r}]; or keep such slots without a row, "
        f'on_unclear_rows="leave out".'
    )
