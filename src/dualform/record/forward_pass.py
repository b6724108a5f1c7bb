"""One forward pass of a recorded model: whose rows it runs, and where they are in the input of each layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from dualform.errors import AxisError, BatchError, DualformError
from dualform.layers.row_arguments import length, tensors_in
from dualform.layers.row_proof import BatchAxes, Proof, Proofs, decision_of, prove, shape_class
from dualform.layers.rows import FIRST, Decision, Layout, Lead, reading_by_length, shape_text
from dualform.layers.slot_source import Arguments
from dualform.record.columns import Batch
from dualform.record.interrupts import INTERRUPTS
from dualform.store.format import RowEvidence

ON_UNCLEAR_ROWS = ("ask", "leave out")
NOT_CALLED = "it was not called when a copy of the model ran with moved rows"
CALLED_OUTSIDE = "it was called outside a forward pass"
COMPILED = "the model was compiled as a whole, so its inputs are not seen: give record() what torch.compile() returns"
SAID_BY_USER = "batch_axis says so"


@dataclass(eq=False, slots=True)
class ForwardPass:
    """A forward pass, from the call of its outermost module on."""

    module: nn.Module
    batch: Batch | None
    shapes: dict[str, set[Hashable]] = field(default_factory=dict)
    """By module: the shape classes of its inputs."""
    calls: dict[str, int] = field(default_factory=dict)
    """By module: how often it has been called."""
    proof: Proof = field(default_factory=Proof)
    """Where the rows are in each call of each layer."""
    problem: DualformError | None = None
    """Why its slots cannot be named."""
    is_compiled: bool = False
    """Whether the model is compiled as a whole: its inputs are not seen, and nothing tells when it begins and ends."""
    is_empty: bool = False
    """Whether the model was given a batch without rows, as batch() announced: no vector belongs to a row."""

    def called(self, module: str, key: Tensor) -> int:
        """Note a call of a recorded module; return its number among the calls of that module."""
        number = self.calls.get(module, 0)
        self.calls[module] = number + 1
        if self.batch is not None:
            self.shapes.setdefault(module, set()).add(shape_class(key, self.batch.rows))
        return number


class RowFinder:
    """Finds where the rows are in the inputs of layers: by experiment, once for each kind of forward pass."""

    def __init__(self, axes: BatchAxes, names: Mapping[nn.Module, str], *, check: bool, on_unclear: str):
        """names: of all modules that may be called from outside. check: whether experiments may be made."""
        self._axes = axes
        self._names = names
        self._check = check
        self._on_unclear = on_unclear
        self.step = 0
        """The current step."""
        self.recorded: dict[str, nn.Module] = {}
        """The recorded modules, by name."""
        self._proofs = Proofs()
        self._dimensions: dict[nn.Module, list[int]] = {}
        """By the module that is called: the numbers of dimensions of its inputs, where their first axis is known to hold the rows."""
        self._assumed: set[str] = set()
        """Modules that were called in a compiled forward pass."""
        self._evidence: dict[str, RowEvidence] = {}
        """By layer: what is known so far …"""
        self.news: dict[str, RowEvidence] = {}
        """… and what of that is in no finished step yet."""

    def begin(self, module: nn.Module, batch: Batch | None) -> ForwardPass:
        """The outermost module is called, with gradients on."""
        if batch is not None:
            batch.uses += 1
        return ForwardPass(module, batch)

    def end(self, forward: ForwardPass, arguments: Arguments) -> None:
        """The outermost module has returned: find the rows, unless a forward pass of this kind has been seen before."""
        batch = forward.batch
        if batch is None:
            return
        if batch.rows == 1:
            self._check_single_row(forward, batch, arguments)
            return
        if batch.rows == 0:
            forward.is_empty = any(tensor.numel() == 0 for tensor in tensors_in(arguments))
            return
        rows = batch.rows
        proof, is_new = self._proofs.get(
            forward.module, arguments, forward.shapes, rows, lambda: self._prove(forward, arguments, rows)
        )
        if is_new:
            self._add_evidence(forward, proof)
        forward.proof = proof
        if not proof.rows_differ and not self._axes.axes:
            self._dimensions[forward.module] = _dimensions(arguments)
        if proof.rows_differ and self._on_unclear == "ask":
            name = self._names.get(forward.module, "")
            forward.problem = _another_row_count(batch, tensors_in(arguments), name)

    def assume(self, forward: ForwardPass, module: str) -> None:
        """A module was called in a compiled forward pass, where nothing can be proved."""
        forward.proof.problem = COMPILED
        if module not in self._assumed and forward.batch is not None and forward.batch.rows > 1:
            self._assumed.add(module)
            self._add_evidence(forward, forward.proof)

    def _check_single_row(self, forward: ForwardPass, batch: Batch, arguments: Arguments) -> None:
        """Refuse a batch of several rows if one was announced. All of a forward pass belongs to its only row, unbatched inputs too, so
        inputs must have as many dimensions as earlier batches had."""
        if self._on_unclear != "ask" or self._dimensions.get(forward.module) != _dimensions(arguments):
            return
        tensors = tensors_in(arguments)
        if tensors and not any(length(tensor, 0) == 1 for tensor in tensors):
            forward.problem = _another_row_count(batch, tensors, self._names.get(forward.module, ""))

    def _prove(self, forward: ForwardPass, arguments: Arguments, rows: int) -> Proof:
        if not self._check:
            return Proof(problem="check_rows=False")
        name = self._names.get(forward.module, "")
        axes = self._axes.with_inputs(self._axes.axes.get(name))
        with INTERRUPTS.held((self, "prove")):  # it changes random states and modes of PyTorch, and puts them back
            return prove(forward.module, arguments, rows, axes, self.recorded, forward.calls)

    def layout(
        self, layer: str, forward: ForwardPass | None, call: int | None, rows: int, lead: Lead, axis: int | None
    ) -> Layout:
        """Return how the input of a layer is read.

        call: its number in the forward pass; None: it was run again in a backward pass (checkpointing). axis: the leading axis of the
        rows, if the module itself names it.
        """
        decision = self._decide(layer, forward, call, rows, lead, axis)
        layout = None if decision.where is None else decision.where.layout(lead, rows)
        if layout is not None:
            return layout
        if forward is not None and forward.is_empty:  # such as position ids, which are there without rows, too
            return Layout(lead, None)
        if self._on_unclear == "leave out":
            return Layout(lead, None)
        raise _unclear(layer, lead, rows, decision)

    def is_first_axis(self, layer: str, forward: ForwardPass | None) -> bool:
        """Whether every call of a layer holds the rows along the first axis of its input, one vector for each."""
        if forward is None or self._axes.axes:
            return False
        decisions = forward.proof.decisions.get(layer)
        if decisions is None:
            return not forward.proof.decisions
        return len(decisions) == 1 and decisions[0].where == FIRST

    def _decide(
        self, layer: str, forward: ForwardPass | None, call: int | None, rows: int, lead: Lead, axis: int | None
    ) -> Decision:
        proof = Proof(problem=CALLED_OUTSIDE) if forward is None else forward.proof
        shown = decision_of(proof.decisions.get(layer, []), call)
        named = self._axes.reading(layer, lead, rows, axis)
        if named is not None:
            is_shown = shown.is_proved and shown.where == named
            return Decision(named, "" if is_shown else SAID_BY_USER)
        if rows < 2:
            return Decision(FIRST)
        if layer in proof.decisions:
            return shown
        why = NOT_CALLED if proof.decisions else proof.problem
        return Decision(reading_by_length(lead, rows, axis), why)

    # What verify and info say

    def _add_evidence(self, forward: ForwardPass, proof: Proof) -> None:
        called = [layer for module in forward.calls for layer in self._axes.layers(module)]
        # Layers under reentrant checkpointing are called with gradients only in the backward pass
        for layer in dict.fromkeys((*called, *proof.decisions)):
            known = self._evidence.get(layer, RowEvidence())
            now = self._extended(known, layer, proof)
            if now != known:
                self._evidence[layer] = now
                self.news[layer] = now

    def _extended(self, known: RowEvidence, layer: str, proof: Proof) -> RowEvidence:
        """What is known about a layer's rows after one more proof."""
        decisions = proof.decisions.get(layer, [])
        if decisions:
            reasons = [decision.why for decision in decisions if not decision.is_proved]
            places = [str(decision.where) if decision.where is not None else "not clear" for decision in decisions]
        else:
            reasons = [NOT_CALLED if proof.decisions else proof.problem]
            places = ["not clear" if proof.rows_differ else "axis 0 by its length"]
        if reasons and self._axes.names(layer):
            reasons = [SAID_BY_USER]
            places = ["as batch_axis says"]
        is_proved = not reasons
        return RowEvidence(
            where=known.where or ", ".join(dict.fromkeys(places)),
            proved=self.step if is_proved and known.proved is None else known.proved,
            assumed=self.step if not is_proved and known.assumed is None else known.assumed,
            why=known.why or (reasons[0] if reasons else ""),
        )

    def forget_news(self, known: Mapping[str, RowEvidence]) -> None:
        """Some of the news are in a finished step now."""
        if self.news:
            self.news = {layer: evidence for layer, evidence in self.news.items() if known.get(layer) != evidence}


def _dimensions(arguments: Arguments) -> list[int]:
    return [tensor.dim() for tensor in tensors_in(arguments)]


def _another_row_count(batch: Batch, tensors: Sequence[Tensor], module: str) -> BatchError:
    called = f"the module {module!r}" if module else "the model"
    axis = f"{{{module!r}: 1}}" if module else "1"
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
    flattened = ""
    if module and any(length(tensor, 0) % batch.rows == 0 for tensor in tensors):
        flattened = f" If the positions of each row were flattened into the first axis: batch_axis={{{module!r}: 0}}."
    reused = f" in forward pass {batch.uses} since that call" if batch.uses > 1 else ""
    return BatchError(
        f"batch() announced {batch.rows} {'row' if batch.rows == 1 else 'rows'}, but {called} was given tensors of shapes {shapes}{reused}, whose first axis is not "
        f"{batch.rows} long. Call recorder.batch() before each forward pass, with gradient accumulation before each micro-batch, with "
        f"one entry for each of its samples. If the rows are along another axis (sequence first), say so: record(…, batch_axis={axis})."
        f'{flattened} To keep the slots of such forward passes without a row: on_unclear_rows="leave out".'
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
            f"batch_axis={{{layer!r}: 1}} if the rows alternate (sequence first). Otherwise leave the layer out, exclude=[{layer!r}], or "
            f'keep such slots without a row, on_unclear_rows="leave out".'
        )
    return AxisError(
        f"layer {layer!r} got an input of shape {shape_text(lead)}, and batch() announced {rows} rows: it is not clear which of its "
        f"vectors belong to which row{why}. Give batch() one entry per sample of this forward pass; name the axis of the rows, "
        f"batch_axis={{{layer!r}: 0}}; leave the layer out, exclude=[{layer!r}]; or keep such slots without a row, "
        f'on_unclear_rows="leave out".'
    )
