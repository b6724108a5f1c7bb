"""Record random trainings and compare every answer with plain float64 references.

A case draws a network, optimizers, groups, accumulation, clipping, a schedule, frozen parameters, batch sizes (0 and 1 too), types, autocast
and the settings of the recording. It is trained in an ordinary loop, with the gradient of each row's loss by autograd (plain.py), and twice with a
recorder: with the loops in C and without. Then

- recording must not have changed the training: the weights are the same bit by bit;
- each slot of a linear layer has the key and the error signal of the row it names;
- verify passes: dual = primal;
- attention weights, their order and their totals are those of plain loops;
- contributions add up to the output, and those of each part of the rows are what a plain replay of the optimizer gives;
- a mask gives the weights of that replay, and a mask and its opposite add up;
- totals are what scans give, while recording and built afterwards;
- with and without loops in C the store holds the same.

Parts of the rows are compared in float64, where rounding cannot hide anything; in other types, what the certificate promises.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import dualform
from campaigns import forks, plain
from campaigns.case import Campaign as Base
from campaigns.case import Outcome
from campaigns.contents import Contents, contents
from campaigns.fuzz_cases import PARTS, Case, draw_case
from campaigns.fuzz_networks import CLASSES, data
from campaigns.plain import Plain
from dualform.dual.coefficients import updates_of
from dualform.dual.gradients import Replayed
from dualform.layers.written import each_written
from dualform.native.kernels import kernels
from dualform.query.dual import Dual
from dualform.store.files import files_at, folder_at
from dualform.store.format import read_manifest
from dualform.store.writer import publish_manifest
from reference import attention as reference  # type: ignore[import-not-found]
from reference import ranking

QUERIES = 3

Array = np.ndarray[Any, Any]


class Campaign(Base):
    """Differential fuzzing."""

    name = "fuzz"
    unit = "cases"
    goal = 5_000
    sources = ("store", "record", "totals", "native", "layers", "dual", "query", "recursions.py", "projection.py")

    def __init__(self, folder: Path):
        self._folder = folder

    def run(self, draw: random.Random, number: int) -> Outcome:
        """One training, recorded twice."""
        case = draw_case(draw)
        outcome = Outcome()
        outcome.counts["cases"] += 1
        try:
            results = forks.call(partial(_compare, case, self._folder / "run"))
        except forks.ChildError as error:
            *_, last = str(error).strip().splitlines()
            outcome.fail(f"{last}\n{case}\n{error}", self._folder / "run")
            return outcome
        for result in results:
            outcome.counts[result] += 1
        for name in (case.spec.kind, case.kind, case.precision, "autocast" if case.autocast else "no autocast"):
            outcome.counts[f"with {name}"] += 1
        return outcome


def _compare(case: Case, folder: Path) -> list[str]:
    """All comparisons of a case; gives what was compared."""
    expected = plain.train(case)
    found = []
    if _records_nothing(case):
        return ["nothing to record"]
    for native in ("1", "0"):
        os.environ["DUALFORM_NATIVE"] = native
        kernels.cache_clear()
        shutil.rmtree(folder, ignore_errors=True)
        model = record(case, folder)
        found.append(Comparison(case, expected, dualform.open(folder, case.network()), model).run())
    _same_contents(found[0].contents, found[1].contents)
    return found[0].compared


def _records_nothing(case: Case) -> bool:
    """Whether all that is trained is the bias of a layer whose weight is tied to one that is not."""
    names = [name for place, (name, _) in enumerate(case.network().named_parameters()) if place not in case.frozen]
    return case.spec.tied and names == ["head.bias"]


def _moves_on_rounding_alone(case: Case) -> bool:
    """Whether all that is trained are biases before a batch normalisation, whose gradients are zero but for rounding."""
    names = [name for place, (name, _) in enumerate(case.network().named_parameters()) if place not in case.frozen]
    return case.spec.norm == "batch" and all(name.endswith(".linear.bias") for name in names)


def record(case: Case, folder: Path) -> nn.Module:
    """Train and record; gives the trained network."""
    model = case.network()
    samples = data(case.spec, case.seed, case.dtype)
    optimizers = case.optimizers(model)
    rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
    settings = {name: value for name, value in case.record.items() if value is not None}
    torch.manual_seed(case.seed)
    # The audit draws its random matrix by os.urandom: here from the seed, so that a case can be run again
    with (
        mock.patch("os.urandom", random.Random(case.seed).randbytes),
        dualform.record(model, optimizers, folder, **settings) as recorder,
    ):
        for step in case.steps:
            for one in optimizers:
                one.zero_grad()
            for batch in step.batches:
                ids = torch.tensor(batch.ids, dtype=torch.int64)
                parts = torch.tensor(batch.parts, dtype=torch.int64)
                recorder.batch(sample_id=ids, label=ids % CLASSES, part=parts)
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    losses = samples.losses(model(samples.inputs[ids]), ids)
                (losses.sum() * (batch.weight * case.scale)).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(case.scale)
            if step.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), step.clip)
            for one, its in zip(optimizers, rates, strict=True):
                for group, rate in zip(one.param_groups, its, strict=True):
                    group["lr"] = rate * step.lr_factor
                one.step()
            if step.seal:
                recorder.seal()
    return model


@dataclass
class Slots:
    """Some slots of a layer."""

    keys: Array
    errors: Array
    rows: list[tuple[int, int, int]]


@dataclass
class Compared:
    """What was compared, and what the store holds."""

    compared: list[str]
    contents: Contents


class Comparison:
    """One recording beside the truth."""

    def __init__(self, case: Case, expected: Plain, dual: Dual, model: nn.Module):
        self.case = case
        self.expected = expected
        self.dual = dual
        self.model = model
        self.compared: list[str] = []
        self.distances: dict[str, float] = {}
        """By parameter: how far the dual is from the trained weights, which the certificate takes for rounding."""
        samples = data(case.spec, case.seed, case.dtype)
        self.inputs = samples.inputs[:QUERIES]
        keep = case.record["keep"]
        self.has_slots = keep == "slots"
        self.has_deltas = keep == "slots" or (keep == "totals" and case.record["totals"] != {"part": "keys"})
        self.is_whole = case.record["outputs"] is None
        self.by_row = not case.spec.rows_interact and not case.autocast

    @property
    def _sharp(self) -> float:
        """How near the replay is in float64. PyTorch keeps NAdam's product of momenta in float32."""
        return 1e-6 if self.case.kind == "NAdam" else 1e-8

    def run(self) -> Compared:
        """Everything that can be compared."""
        self._training_is_unchanged()
        if self.has_deltas:
            self._verify_passes()
        if self.case.record["keep"] != "totals":
            self._rows_have_their_names()
            self._attention_is_as_by_loops()
        if self.has_slots:
            self._slots_are_as_captured()
            self._contributions_add_up()
        if self.has_deltas and self.is_whole:
            self._masks_are_as_replayed()
        if self.has_slots and self.is_whole:
            self._totals_are_as_scanned()
        return Compared(self.compared, contents(self.dual.store))

    def _training_is_unchanged(self) -> None:
        for name, parameter in self.model.named_parameters():
            if not np.array_equal(parameter.detach().double().numpy(), self.expected.weights[name], equal_nan=True):
                raise AssertionError(f"{name}: recording has changed the training")
        self.compared.append("training")

    def _verify_passes(self) -> None:
        certificate = self.dual.verify()
        if not certificate.passed:
            raise AssertionError(f"verify: {certificate}")
        self.distances = dict(zip(certificate.frame["parameter"], certificate.frame["distance"], strict=True))
        self.compared.append("verify")

    def _rows_have_their_names(self) -> None:
        if self.dual.layers == ["places"] and self.case.spec.places == "shared":
            return  # it serves all rows at once: no slot has a row
        if _moves_on_rounding_alone(self.case):
            return  # no slot is kept, so there are no rows
        # Within a step, rows are numbered in the order in which their slots are stored
        if sorted(self._rows()) != sorted(self.expected.rows):
            raise AssertionError(f"rows: {self._rows()} instead of {self.expected.rows}")
        self.compared.append("rows")

    def _rows(self) -> list[tuple[int, int, int]]:
        """(step, sample, part) of each row."""
        rows = self.dual.rows
        return list(zip(rows["step"], rows["sample_id"], rows["part"], strict=True))

    def _rows_of_slots(self, layer: str) -> list[tuple[int, int, int] | None]:
        """The same of each slot of a layer; None for a slot without a row."""
        rows = self._rows()
        numbers = np.concatenate([chunk.rows() for chunk in self.dual.store.chunks(layer)])
        return [rows[number] if number >= 0 else None for number in numbers.tolist()]

    def _linear_layers(self) -> list[str]:
        """Recorded linear layers that are called once for each batch."""
        passes = sum(len(step.batches) for step in self.case.steps)
        known = self.dual.layers
        return [name for name, keys in self.expected.keys.items() if len(keys) == passes and name in known]

    def _slots_are_as_captured(self) -> None:
        if self.case.autocast:
            return
        tolerance = 2e-3 if self.case.record["dtype"] == "float16" else 1e-6
        for name in self._linear_layers():
            expected = self._expected_slots(name)
            outputs = self.dual.store.layer(name)[1].outputs
            chunks = list(self.dual.store.chunks(name))
            if not chunks:
                continue
            wrote = ~np.concatenate([np.zeros(c.slots, np.bool_) if c.silent is None else c.silent for c in chunks])
            errors = torch.cat([chunk.errors(torch.float64) for chunk in chunks]).numpy()[wrote]
            known = expected.errors[:, list(outputs)] if outputs else expected.errors
            _close(f"keys of {name}", self.dual.layer(name).keys.numpy()[wrote], expected.keys, tolerance)
            _close(f"error signals of {name}", errors, known, tolerance)
            rows = [row for row, of_slot in zip(self._rows_of_slots(name), wrote, strict=True) if of_slot]
            if rows != expected.rows:
                raise AssertionError(f"slots of {name}: rows {rows} instead of {expected.rows}")
            self.compared.append("slots")

    def _expected_slots(self, layer: str) -> Slots:
        """The slots of a linear layer that wrote something."""
        keys = np.concatenate(self.expected.keys[layer])
        errors = np.concatenate(self.expected.errors[layer])
        positions = len(keys) // max(1, len(self.expected.rows))
        rows = [row for row in self.expected.rows for _ in range(positions)]
        wrote = (errors != 0).any(1)
        return Slots(keys[wrote], errors[wrote], [row for row, here in zip(rows, wrote, strict=True) if here])

    def _attention_is_as_by_loops(self) -> None:
        if self.case.autocast:
            return
        # Without error signals in the store, it is not known which slots wrote nothing
        if self.case.record["keep"] == "keys" and self.case.spec.predicts_words:
            return
        attention = self.dual.attend(self.inputs)
        tolerance = 5e-3 if self.case.record["dtype"] == "float16" else 1e-5
        for name in self._linear_layers():
            slots = self._expected_slots(name)
            keys = slots.keys
            answer = attention[name]
            queries = answer.queries.reshape(-1, keys.shape[1]).double().numpy()
            expected = reference.attention_weights(keys.tolist(), queries.tolist())
            pieces = [scores.reshape(len(queries), -1) for _, scores in answer.scores()]
            found = torch.cat(pieces, dim=1).numpy() if pieces else np.zeros_like(expected)
            _close(f"attention of {name}", found, expected, tolerance)
            if len(keys):
                self._compare_top(name, answer, expected, slots.rows, tolerance)
            self.compared.append("attention")

    def _compare_top(
        self, name: str, answer: Any, expected: Array, rows: list[tuple[int, int, int]], tolerance: float
    ) -> None:
        top = answer.top(4)
        best = [row[ranking.top(row.tolist(), 4)] for row in expected]
        _close(f"top of {name}", top["weight"].to_numpy(), np.concatenate(best), tolerance, size=_size(expected))
        of_slots = np.array([part for _, _, part in rows])
        totals = answer.total("part").drop_nulls("part").sort("query", "position", "part")
        groups = sorted({part for _, _, part in self.expected.rows})
        sums = np.array([[row[of_slots == group].sum() for group in groups] for row in expected])
        # A sum is rounded relative to its terms, which may cancel
        size = _size(np.abs(expected).sum(1))
        _close(f"totals of {name}", totals["total"].to_numpy(), sums.reshape(-1), tolerance, size=size)

    def _contributions_add_up(self) -> None:
        """Initial part and slots of the last layer make the output; the slots of each part make what the replay says."""
        if self.case.spec.predicts_words or self.case.autocast:
            return
        layer = self.dual.store.layer("head")[1] if "head" in self.dual.layers else None
        target = 2
        if layer is None or self.case.spec.tied:
            return
        answer = self.dual.contributions(self.inputs, target=target)["head"]
        parts = answer.parts()
        primal = self.dual.model()
        hidden = self._inputs_of_head(primal)
        with torch.no_grad():
            output = primal(self.inputs)[:, target].double().numpy()
        tolerance = {"float16": 2e-2, "float32": 1e-4}.get(
            self.case.record["dtype"], 1e-4 if self.case.precision == "float32" else 1e-9
        )
        size = _size(output) + _size(parts["initial"].to_numpy()) + _size(parts["slots"].to_numpy())
        total = (parts["initial"] + parts["slots"] + parts["remainder"]).to_numpy()
        _close("parts of the output", total, output, tolerance, size=size)
        self.compared.append("contributions")
        if not (self.case.is_exact and self.by_row):
            return
        totals = answer.total("part")
        for part in range(PARTS):
            mine = totals.filter(totals["part"] == part)
            if not mine.height:
                continue
            written = self.expected.parts[part]
            zero = np.zeros(1)
            weight = written["head.weight"][target] if "head.weight" in written else np.zeros(hidden.shape[1])
            bias = written["head.bias"][target] if "head.bias" in written else zero
            expected = hidden @ weight + bias
            _close(f"contributions of part {part}", mine["total"].to_numpy(), expected, self._sharp, size=size)
        self.compared.append("contributions of parts")

    def _inputs_of_head(self, primal: nn.Module) -> Array:
        seen: list[Tensor] = []
        handle = primal.get_submodule("head").register_forward_hook(lambda _, given, output: seen.append(given[0]))
        with torch.no_grad():
            primal(self.inputs)
        handle.remove()
        return seen[0].double().numpy()

    def _masks_are_as_replayed(self) -> None:
        """A mask gives the weights of the replay without some rows; a mask and its opposite add up."""
        read = "kept"
        kept = self.dual.masked(only="part = 1", read=read).state_dict()
        dropped = self.dual.masked(drop="part = 1", read=read).state_dict()
        nothing = self.dual.masked(only="part = 99", read=read).state_dict()
        whole = self.model.state_dict()
        recorded = [parameter.name for parameter in self.dual.store.manifest.parameters]
        for name in recorded:
            values = [state[name].double().numpy() for state in (kept, dropped, nothing, whole)]
            one, other, none, full = values
            size = _size(np.stack(values))
            rough = {"float16": 5e-2, "float32": 2e-3}.get(self.case.record["dtype"], 2e-3)
            tolerance = rough if self.case.autocast or not self.case.is_exact else 1e-8
            if not self.case.is_exact and self.case.kind != "SGD":
                continue  # rounding is divided by its own size
            # A mask and its opposite make the dual, not the trained weights
            rounding = self.distances[name] if not self.case.is_exact else self._rounding_of_masks(name)
            _close(f"masks of {name}", one + other, full + none, tolerance, size=size, rounding=rounding)
            if self.case.is_exact and self.by_row and self._has_rows(name):
                _close(f"initial part of {name}", none, self.expected.initial[name], self._sharp, size=size)
                _close(f"{name} of part 1", one - none, self.expected.parts[1][name], self._sharp, size=size)
        self.compared.append("masks")

    def _has_rows(self, name: str) -> bool:
        """Whether the replay knows what each row did to a parameter."""
        is_frozen = name not in self.expected.initial
        is_shared = self.case.spec.places == "shared" and name == "places.weight"
        # The bias of an attention's keys has no true gradient: rounding is divided by its own size
        is_rounding = self.case.kind != "SGD" and name.endswith("in_proj_bias")
        return not (is_frozen or is_shared or is_rounding)

    def _totals_are_as_scanned(self) -> None:
        """Totals by part, from the folder of totals and from the slots."""
        folder = Path(self.dual.store.location)
        if not self.dual.store.manifest.totals:
            dualform.build_totals(folder, "part")
        with_totals = dualform.open(folder, self.case.network())
        bare = folder.with_name("bare")
        shutil.rmtree(bare, ignore_errors=True)
        shutil.copytree(folder, bare)
        _without_totals(bare)
        without = dualform.open(bare, self.case.network())
        tolerance = 1e-8 if self.case.is_exact else 1e-4
        attention, scanned = with_totals.attend(self.inputs), without.attend(self.inputs)
        for name in attention:
            one, other = (each[name].total("part").sort("query", "position", "part") for each in (attention, scanned))
            size = _size_of_terms(scanned[name])
            _close(f"kept totals of {name}", one["total"].to_numpy(), other["total"].to_numpy(), tolerance, size=size)
        self.compared.append("totals")
        if not self.case.is_exact:
            return
        by_totals, by_scan = (each.masked(drop="part = 0").state_dict() for each in (with_totals, without))
        for name in by_totals:
            rounding = self._rounding_of_masks(name)
            found, scanned_mask = by_totals[name].numpy(), by_scan[name].numpy()
            _close(f"mask of {name} by totals", found, scanned_mask, 1e-8, rounding=rounding)

    def _rounding_of_masks(self, name: str) -> Array | float:
        """How far two ways to sum the slots of a vector may be apart in a mask, in each element; 0 for a matrix.

        A sum of n terms is off by up to n roundoffs of their sizes (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), whatever is
        left of it. In the bias of an attention's keys nothing is left: what a row writes there is rounding alone, which Adam divides by its
        own size, and which weight decay divided by a tiny ε multiplies in every step. So the bound goes through the coefficients of
        the replay. Under the Adam family, the library sums slots of vectors in the longest type there is.
        """
        store = self.dual.store
        is_recorded = name in [parameter.name for parameter in store.manifest.parameters]
        if not is_recorded or not self.has_slots or name not in self.expected.coefficients:
            return 0.0
        updates = updates_of(store, name)
        roundoff = np.finfo(np.float64 if self.case.kind == "SGD" else np.longdouble).eps / 2
        replayed = Replayed(store, updates, keep=lambda chunk: np.ones(chunk.slots, np.bool_))
        total = np.zeros(replayed.shape)
        for place, step in enumerate(updates.steps.tolist()):
            sizes, terms = np.zeros(replayed.shape), 0
            for call in replayed.read(place).calls:
                for use in replayed.uses(call.layer):
                    written = each_written(use, call.keys, call.errors)
                    own = sizes[slice(*use.rows)] if use.rows else sizes
                    own += abs(call.factor) * written.abs().sum(0).numpy()
                    terms += len(call.errors)
            both = 2 * (terms + 1) * float(roundoff) * sizes  # the product with the factor is one more rounding
            total += np.abs(self.expected.coefficients[name][step]) * both
        return total


def _without_totals(folder: Path) -> None:
    """Forget the totals of a store."""
    publish_manifest(folder_at(folder), replace(read_manifest(files_at(folder)), totals=None))


def _size(values: Array) -> float:
    return float(np.abs(values).max(initial=0))


def _size_of_terms(answer: Any) -> float:
    """The largest sum of absolute attention weights: what totals add up may cancel, but its rounding does not."""
    pieces = [scores.abs().sum(-1) for _, scores in answer.scores()]
    return _size(torch.stack(pieces).sum(0).double().numpy()) if pieces else 0.0


def _close(
    what: str,
    found: Array,
    expected: Array,
    tolerance: float,
    size: float | None = None,
    rounding: Array | float = 0.0,
) -> None:
    """Whether numbers are equal up to a part of the largest of them. rounding: a bound on what rounding explains, beside that."""
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: shape {found.shape} instead of {expected.shape}")
    size = _size(expected) if size is None else size
    distance = _size((np.abs(found - expected) - rounding).clip(min=0))
    if not distance <= tolerance * size + 1e-300:
        raise AssertionError(f"{what}: off by {distance:.2e}, numbers up to {size:.2e}")


def _same_contents(one: Contents, other: Contents) -> None:
    """With and without loops in C a store holds the same, to rounding."""
    if set(one.tables) != set(other.tables):
        raise AssertionError("the loops in C record other layers")
    for name, table in one.tables.items():
        for column, values in table.items():
            mine = other.tables[name][column]
            if isinstance(values, np.ndarray) and values.dtype.kind == "f":
                _close(f"{name}, {column}, without loops in C", mine, values, 1e-5)
            elif column == "factors":  # of a gradient that is rounding alone, they are anything
                if [len(line) for line in mine] != [len(line) for line in values]:
                    raise AssertionError(f"{name}: factors differ without loops in C")
            elif not np.array_equal(np.asarray(mine, dtype=object), np.asarray(values, dtype=object)):
                raise AssertionError(f"{name}: {column} differs without loops in C")
