"""Contributions: what each slot adds to a number that the model computes.

A slot adds value · (key · query) to its layer's output (+ the bias's part). Its contribution to a target is the inner
product of that with ∂target/∂output at the query: exact where the target is an output of the layer (the last layer's
logits), first order in hidden layers, with the remainder shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.coefficients import Coefficients, is_elementwise, walked
from dualform.dual.gradients import Rows, Updates, chosen_rows, kept_rows, updates_of
from dualform.dual.replay import Backward
from dualform.dual.scores import inner, products, scores
from dualform.dual.totals import View, find
from dualform.dual.weights import initial, rebuilt, scaled
from dualform.errors import NotRecordedError, QuestionError
from dualform.layers.keys import part
from dualform.layers.streams import Layer, Use
from dualform.progress import Progress
from dualform.query.answers import Answer, Scores
from dualform.query.attention import part_columns
from dualform.query.bounds import Contributions, seen
from dualform.query.pruned import Bounds
from dualform.query.ranking import Way
from dualform.query.remembered import remembered
from dualform.query.visits import keys_of
from dualform.store.heap import Room
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

MEMORY = 128 << 20
"""How much the scores of a stretch of queries, and their products, may take where coefficients are matrices."""
GATES = {4: ("i", "f", "g", "o"), 1: ("h",)}


class LayerContributions(Answer):
    """The contributions of one layer's slots to a target, summed over the query's positions. Threads may share it."""

    value = "contribution"
    _bounded = True

    def __init__(
        self,
        store: Store,
        layer: Layer,
        end: int,
        queries: Tensor,
        gradients: Tensor,
        target: Tensor,
        dtype: torch.dtype,
        *,
        asked: Layer | None = None,
        uses: Sequence[Use] | None = None,
        silent: bool = False,
        progress: Progress | None = None,
    ):
        """queries (examples, positions, d_in); gradients (examples, positions, d_out); target (examples,).

        asked: the layer that the queries are of, if it shares a parameter with the layer whose slots these are.
        """
        super().__init__(store, layer, end, {"query": queries.shape[0]}, dtype, silent=silent)
        self._terms = max(1, queries.shape[1])  # the positions are summed last
        self._queries, self._gradients = queries.to("cpu", dtype), gradients.to("cpu", dtype)
        self._target = target.to("cpu", torch.float64)
        self._asked = layer if asked is None else asked
        self._uses = self._asked.uses if uses is None else uses
        self._found: tuple[slice, Tensor] | None = None
        self._opened: tuple[int, SlotChunk | None] | None = None
        self._progress = progress

    def __repr__(self) -> str:
        return f"LayerContributions({self.layer.name!r}, {len(self._target)} queries): top, total, contributions, parts"

    def contributions(self, *, where: pl.Expr | str | None = None) -> Iterator[Scores]:
        """Every contribution, chunk by chunk: (slots (m,), contributions (examples, m))."""
        return self._scores(where)

    @cached_property
    def tied(self) -> dict[str, LayerContributions]:
        """What the slots of other layers add that share this one's weight (tied embeddings), by layer."""
        own = {use.parameter for use in self._uses}
        others = [y for y in self._store.manifest.layers if y is not self.layer and own & set(y.parameters)]
        return {
            other.name: LayerContributions(
                self._store, other, self._end, self._queries, self._gradients, self._target, self._dtype,
                asked=self._asked, uses=[use for use in self._uses if use.parameter in other.parameters], silent=self._silent,
                progress=self._progress,
            )
            for other in others
            if self._asked is self.layer and not self._disjoint(other)
        }  # fmt: skip

    def _disjoint(self, other: Layer) -> bool:
        """Whether two layers use different rows of what they share (the parts of an attention)."""
        shared = [(a, b) for a in self._uses for b in other.uses if a.parameter == b.parameter]
        return all(a.rows and b.rows and (a.rows[1] <= b.rows[0] or b.rows[1] <= a.rows[0]) for a, b in shared)

    def part(self, name: str) -> LayerContributions:
        """For recurrent layers: the part of the "input" or the "recurrent" weights alone."""
        columns, weights = part_columns(self.layer, name), self.layer.bilinear()
        if not columns:
            return self
        place = 0 if columns[0] == 0 else 1
        biases = [use for use in self.layer.uses if use.role == "bias"]
        return self._only([weights[place], *biases[place : place + 1]], self._gradients)

    def gate(self, name: str) -> LayerContributions:
        """For recurrent layers: what goes through one gate, of an LSTM "i", "f", "g", "o", of a GRU "r", "z", "n"."""
        if self.layer.kind != "recurrent":
            raise QuestionError(f"gate({name!r}): layer {self.layer.name!r} is not recurrent.")
        names, hidden = gates_of(self.layer), _hidden(self.layer)
        if name not in names:
            raise QuestionError(
                f"gate({name!r}): the gates of layer {self.layer.name!r} are {', '.join(map(repr, names))}."
            )
        low = names.index(name) * hidden
        high = self.layer.d_out if name == "n" else low + hidden
        taken = torch.zeros_like(self._gradients)
        taken[..., low:high] = self._gradients[..., low:high]
        return self._only(self._uses, taken)

    def _only(self, uses: Sequence[Use], gradients: Tensor) -> LayerContributions:
        return LayerContributions(
            self._store, self.layer, self._end, self._queries, gradients, self._target, self._dtype, uses=uses,
            silent=self._silent,
        )  # fmt: skip

    def parts(self) -> pl.DataFrame:
        """For each query: initial part + slots + remainder = target.

        The remainder is rounding where the target is an output of this layer; in hidden layers it is what the first
        order leaves out (what later layers add by themselves). Slots of layers that share the weight are counted in.
        """
        view = find(self._store, (), self._end, deltas=True, subset=True)
        if view is not None:
            kept = self._of_groups(view)
            return self._parts(self._initial(view), kept.sum(1))
        self._needs_scan("parts")
        slots = torch.zeros_like(self._target)
        for one in (self, *self.tied.values()):
            for queries in one._query_blocks(1):
                for _, found, _, _ in one._stream(queries, None):
                    slots[queries] += found.double().sum(1)
        return self._parts(self._initial(None), slots)

    def _parts(self, initial: Tensor, slots: Tensor) -> pl.DataFrame:
        return pl.DataFrame(
            {
                "query": range(len(self._target)),
                "initial": initial.numpy(),
                "slots": slots.numpy(),
                "remainder": (self._target - initial - slots).numpy(),
                "target": self._target.numpy(),
            },
            schema={
                "query": pl.Int64,
                **dict.fromkeys(("initial", "slots", "remainder", "target"), pl.Float64),
            },
        )

    # Which rows of a weight the target depends on

    @cached_property
    def _units(self) -> list[int]:
        """The outputs that the target depends on, if they are few; else none: all are taken."""
        found = torch.nonzero((self._gradients != 0).any(0).any(0))[:, 0].tolist()
        kept = self._asked.outputs
        if kept:
            missing = sorted(set(found) - set(kept))
            if missing:
                raise NotRecordedError(
                    f"the target depends on output {missing[0]} of layer {self._asked.name!r}, whose error signals were not kept "
                    f"(outputs=). Kept: {len(kept)} of {self._asked.d_out}."
                )
            return found or list(kept[:1])
        return found if 0 < 2 * len(found) <= self._asked.d_out else []

    def _rows(self, use: Use) -> Rows | None:
        """The rows of a use's weight that matter; None: all."""
        if use.role != "weight" or not self._units:
            return None
        return chosen_rows(self._store, use.parameter, self._units)

    def _pairs(self) -> list[tuple[Use, Use]]:
        """(how the query uses a parameter, how the slots do)."""
        own = [] if self._asked is self.layer else list(self.layer.uses)
        return [(a, b) for a in self._uses for b in (own or [a]) if a.parameter == b.parameter]

    # Totals that were kept

    def _kept(self, columns: list[str], absolute: bool) -> tuple[View, Tensor] | None:
        view = None if absolute else find(self._store, columns, self._end, deltas=True)
        if view is None or (self.tied and self._store.manifest.keep != "totals"):
            return None
        return view, self._of_groups(view)

    def _of_groups(self, view: View) -> Tensor:
        """⟨∂target/∂parameter, group deltas⟩, (examples, groups) float64."""
        totals = torch.zeros(len(self._target), view.groups.height, dtype=torch.float64)
        for use in self._uses:
            for group, delta in enumerate(view.deltas(use.parameter).to(self._dtype)):
                own = delta[use.rows[0] : use.rows[1]] if use.rows else delta
                for queries in self._query_blocks(1):
                    both = self._queries[queries], self._gradients[queries]
                    totals[queries, group] += inner(use, self._asked, *both, own).double()
        return totals

    def _product(self, use: Use, queries: slice, rows: Rows | None) -> Tensor:
        return products(use, self._asked, self._queries[queries], self._gradients[queries], rows)

    def _narrowed(self, use: Use, product: Tensor) -> Tensor:
        """Of a bias, only the outputs whose error signals were kept."""
        return product[:, list(self.layer.outputs)] if use.role == "bias" and self.layer.outputs else product

    def _initial(self, view: View | None) -> Tensor:
        """⟨∂target/∂parameter, initial part⟩, (examples,) float64."""
        total = torch.zeros_like(self._target)
        for use in self._uses:
            rows = None if view is not None else self._rows(use)
            small = use.role in ("bias", "scale")
            if view is not None:
                first = view.initial(use.parameter)
            elif small:
                # What bias gradients hold beyond the sum of their slots is rounding: it stays with the initial part.
                nothing = lambda chunk: chunk.place < 0  # noqa: E731
                first = rebuilt(self._store, use.parameter, begin=0, end=self._end, keep=nothing)
            else:
                first = initial(self._store, use.parameter, self._end, rows)
            own = first[use.rows[0] : use.rows[1]] if use.rows else first
            for queries in self._query_blocks(1):
                both = self._queries[queries].double(), self._gradients[queries].double()
                total[queries] += inner(use, self._asked, *both, own, rows)
        return total

    # Coefficients

    @cached_property
    def _updates(self) -> dict[str, Updates]:
        names = {use.parameter for use, _ in self._pairs()}
        return {name: updates_of(self._store, name, end=self._end) for name in names}

    @cached_property
    def _matrices(self) -> bool:
        """Whether any coefficient is a matrix."""
        return any(is_elementwise(updates) for updates in self._updates.values())

    @cached_property
    def _coefficients(self) -> dict[str, Coefficients]:
        return {
            name: remembered(self._store, ("coefficients", name), lambda some=some: walked(some), self._end)  # type: ignore[misc]
            for name, some in self._updates.items()
            if not is_elementwise(some)
        }

    def _query_blocks(self, width: int) -> Iterator[slice]:
        if self._store.manifest.keep == "slots":
            largest = 8 * self._largest
            if self._matrices:
                largest = max(largest, 4 * self._store.slots(self.layer.name), 8 * self._largest)
            width = max(width, largest // 4) if (self._matrices or self._by_product) else width
            size = max(1, MEMORY // max(1, largest)) if (self._matrices or self._by_product) else 1 << 40
            for block in super()._query_blocks(width):
                for low in range(block.start, block.stop, size):
                    yield slice(low, min(low + size, block.stop))
            return
        yield from super()._query_blocks(max(width, self._largest))

    @cached_property
    def _largest(self) -> int:
        """How many numbers ∂target/∂parameter takes, for one query."""
        sizes = [0]
        for use in self._uses:
            shape = self._store.manifest.parameters[self._store.parameter(use.parameter)].shape
            rows = len(self._units) if use.role == "weight" and self._rows(use) is not None else shape[0]
            sizes.append(rows * int(np.prod(shape[1:])))
        return max(sizes)

    @cached_property
    def _by_product(self) -> bool:
        """Whether it is cheaper, or needed, to sum over the query's positions first."""
        layer, positions = self._asked, self._queries.shape[1]
        plain = self._asked is self.layer and layer.form in ("vectors", "maps") and not layer.outputs
        return (
            not plain or layer.form == "maps" or positions * (layer.d_in + layer.d_out) > 2 * layer.d_in * layer.d_out
        )

    def _bounds(self, slots: Tensor, way: Way) -> Bounds | None:
        shapes = [(use.role, *use.keys, *use.errors, *(use.rows or ()), use.groups) for use in self._uses]
        plain = shapes in ([("weight", 1)], [("weight", 1), ("bias", 1)])
        if not plain or self._matrices or self._by_product or self._queries.shape[1] != 1:
            return None
        weight, *biases = (self._per_slot(use.parameter)[slots] for use in self._uses)
        keys = keys_of(self._store, self.layer.name, self._end, slots)
        return Contributions(
            seen(self._store, self.layer, "key", self._queries[:, 0], keys),
            seen(self._store, self.layer, "error", self._gradients[:, 0], slots),
            weight,
            biases[0] if biases else torch.zeros_like(weight),
            way,
        )

    def _per_slot(self, parameter: str) -> Tensor:
        """(slots,): −coefficient of each slot."""
        chunks = self._store.addresses(self.layer.name, end_step=self._end)
        known = self._coefficients[parameter]
        return torch.cat([scaled(chunk, known, 0, chunk.slots, self._dtype)[:, 0] for chunk in chunks])

    def _all_scores(self, queries: slice) -> Tensor:
        """The scores of some queries for all slots, (queries, slots), where coefficients are matrices; the last ones are kept."""
        known = self._found  # read once: another thread may replace it at any time
        if known is not None and known[0] == queries:
            return known[1]
        found = self._walk(queries)
        self._found = (queries, found)
        return found

    def _tile(self, queries: slice, chunk: SlotChunk, low: int, high: int, scratch: Room) -> Tensor:
        if self._matrices:
            return self._all_scores(queries)[:, chunk.first_slot + low : chunk.first_slot + high]
        keys, errors = chunk.keys(self._dtype, low, high), chunk.errors(self._dtype, low, high)
        total = torch.zeros(queries.stop - queries.start, high - low, dtype=self._dtype)
        if self._by_product:
            for use, own in self._pairs():
                rows = self._rows(use) if own is use else None
                found = scores(own, self._narrowed(own, self._product(use, queries, rows)), keys, errors, rows)
                total += found * scaled(chunk, self._coefficients[use.parameter], low, high, self._dtype).T
            return total
        by_errors: dict[tuple[int, ...], list[Use]] = {}
        for use in self._uses:
            by_errors.setdefault(use.errors if use.role != "scale" else (-1,), []).append(use)
        for columns, uses in by_errors.items():  # (examples, positions, slots)
            weights = torch.zeros((), dtype=self._dtype)
            for use in uses:
                scale = scaled(chunk, self._coefficients[use.parameter], low, high, self._dtype)[:, 0]
                flat = self._queries[queries].reshape(-1, self._queries.shape[-1])
                if use.role == "bias":
                    weights = weights + scale
                else:
                    weights = weights + (keys.dot(flat, use.keys) * scale).reshape(
                        -1, self._queries.shape[1], high - low
                    )
            slopes, found = part(self._gradients[queries], columns), part(errors, columns)
            total += (weights * (slopes @ found.T)).sum(1)
        return total

    def _walk(self, queries: slice) -> Tensor:
        """All scores at once, (queries, slots): matrices come from the last step to the first."""
        found = self._walked(queries, self._dtype)
        if self._dtype != torch.float64 and not found.isfinite().all():
            # Coefficients may leave the range of float32 in weights that wrote next to nothing
            found = self._walked(queries, torch.float64).to(self._dtype)
        return found

    def _walked(self, queries: slice, dtype: torch.dtype) -> Tensor:
        total = torch.zeros(queries.stop - queries.start, self._store.slots(self.layer.name), dtype=dtype)
        for use, own in self._pairs():
            updates = self._updates[use.parameter]
            rows = self._rows(use) if own is use else None
            rows = kept_rows(self._store, use.parameter) if rows is None else rows
            product = self._product(use, queries, rows).to(dtype)
            if not is_elementwise(updates):
                for chunk in self._store.chunks(self.layer.name, end_step=self._end):
                    for low, high in chunk.pieces(self.layer.d_in + self.layer.d_out):
                        keys, errors = chunk.keys(dtype, low, high), chunk.errors(dtype, low, high)
                        found = scores(own, self._narrowed(own, product), keys, errors, rows)
                        scale = scaled(chunk, self._coefficients[use.parameter], low, high, dtype)
                        total[:, chunk.first_slot + low : chunk.first_slot + high] += found * scale.T
                continue
            for place, matrix in Backward(self._store, updates, rows, wide=dtype == torch.float64):
                if self._progress is not None:
                    self._progress(f"replaying {use.parameter}", len(updates.steps) - place, len(updates.steps))
                part_of = matrix.reshape(len(matrix), -1) if matrix.dim() > 1 else matrix
                part_of = part_of[use.rows[0] : use.rows[1]] if use.rows else part_of
                weighed = product * part_of.reshape(product.shape[1:])
                self._score_step(total, own, weighed, rows, updates, place)
        return total

    def _score_step(
        self, total: Tensor, own: Use, weighed: Tensor, rows: Rows | None, updates: Updates, place: int
    ) -> None:
        step, factors = int(updates.steps[place]), updates.factors[place]
        chunk = self._chunk(step)
        if chunk is None:
            return
        first, last = np.searchsorted(chunk.blocks[:, 0], [step, step + 1])
        for block in range(int(first), int(last)):
            backward = int(chunk.blocks[block, 1])
            factor = float(factors[backward]) if backward < len(factors) else 0.0
            low, high = int(chunk.starts[block]), int(chunk.starts[block] + chunk.counts[block])
            if factor and high > low:
                keys, errors = chunk.keys(total.dtype, low, high), chunk.errors(total.dtype, low, high)
                found = scores(own, self._narrowed(own, weighed), keys, errors, rows)
                total[:, chunk.first_slot + low : chunk.first_slot + high].add_(found, alpha=-factor)

    def _chunk(self, step: int) -> SlotChunk | None:
        ends = [chunk.end_step for chunk in self._store.manifest.chunks]
        place = int(np.searchsorted(ends, step, side="right"))
        known = self._opened  # read once: another thread may replace it at any time
        if known is not None and known[0] == place:
            return known[1]
        found = self._store.chunk_of(self.layer.name, place)
        self._opened = (place, found)
        return found


def gates_of(layer: Layer) -> tuple[str, ...]:
    """The names of a recurrent layer's gates, in the order of its outputs; none for other layers."""
    if layer.kind != "recurrent":
        return ()
    return ("r", "z", "n") if layer.bilinear()[0].errors else GATES[layer.d_out // _hidden(layer)]


def _hidden(layer: Layer) -> int:
    low, high = layer.bilinear()[1].keys[:2]
    return high - low
