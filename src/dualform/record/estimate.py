"""`dualform.estimate`: how much disk and memory a recording will take, for everything that `keep=` may be, before training.

A forward pass tells how many slots a row leaves in each layer. The rest is arithmetic over what the store holds (docs/store-format.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dualform.errors import QuestionError
from dualform.layers.projected import DEFAULT_SIZE, SlotViews, projected_layer
from dualform.record.choose import Choice, choose
from dualform.record.curvature import MOST_NUMBERS
from dualform.record.curvature import sizes as curvature_sizes
from dualform.record.finished import SHARE_IF_NOT_REBUILT, SNAPSHOT_CHUNKS, SNAPSHOT_SHARE, STEPS_APART
from dualform.record.keep import Keep, keep_of
from dualform.record.layer_sizes import LayerSizes, layer_sizes
from dualform.record.outputs import keep_outputs
from dualform.record.row_gradients import is_smaller
from dualform.store.encoding import TORCH
from dualform.store.format import BLOCK_FIELDS, DTYPES, SUMMED, size_text

KEPT_BY_ROW = ("slots", "rows", "projected", "keys")
"""What grows with the number of rows; totals grow with the groups."""
BLOCK_BYTES = 8 * len(BLOCK_FIELDS)
KEY_NUMBER = 8
UPDATE_BYTES = 20
"""About so many bytes a step and parameter take in the table of updates."""
CHUNK_HEADERS = 5_000
LAYER_HEADERS = 800
"""About so many bytes the headers of a chunk's files take, with those of each layer, …"""
TENSOR_HEADER = 150
"""… and a tensor in that of a snapshot."""
TIME_FACTORS = {"transformer": 1.4, "convolutions": 2.0}
"""Recorded / bare training, by `python bench/recording_networks.py`, for slots in float32 on a CPU. Rough: it depends on machine and sizes."""


@dataclass(frozen=True)
class LayerEstimate:
    """One layer."""

    name: str
    kind: str
    slots: float
    """How many slots a row has."""
    bytes_per_row: Mapping[str, float]
    """By what is kept: one of KEPT_BY_ROW."""
    numbers_per_group: int
    """How many numbers totals hold of a group: its keys' sum, and its parts of the weights and of their averages."""
    curvature: Mapping[str, int]
    """By what is kept: how many numbers its curvature has. It is counted where slots are summed."""
    is_summed: Mapping[str, bool]
    """By what is kept: whether its slots are summed row by row."""
    is_projected: bool
    """Whether keep="projected" makes its slots any shorter."""
    vector_bytes: float
    """What the gradients of its biases and elementwise weights take in a step; kept where slots are exact."""

    def is_exact(self, keep: str) -> bool:
        """Whether its gradients can be put together again."""
        return keep in ("slots", "rows") or (keep == "projected" and not self.is_projected)


@dataclass(frozen=True)
class Estimate:
    """What recording a training will take. `print` shows it; `frame` has a line for each layer."""

    rows: int
    batch: int
    dtype: str
    layers: Sequence[LayerEstimate]
    step_bytes: float
    """What a step takes in the table of updates."""
    weight_bytes: int
    """What the weights that training can change take in a snapshot, buffers included."""
    state_bytes: int
    """What the optimizer's state of recorded weights takes; the first snapshot has none."""
    time_factor: float
    """How many times as long as bare training, roughly: measured on other networks and another machine."""
    queue_bytes: int
    chunk_bytes: int
    every: int = 1
    """n: the slots of one step in n are kept."""

    @property
    def steps(self) -> int:
        """How many updates there are, if each has one batch."""
        return -(-self.rows // self.batch)

    def bytes_per_row(self, keep: Keep = "slots") -> float:
        """How many bytes a row takes, all layers together, in a step whose slots are kept. keep: as for record(), also by layer."""
        return sum(layer.bytes_per_row[kept] for layer, kept in self._by_layer(keep))

    def _by_layer(self, keep: Keep) -> list[tuple[LayerEstimate, str]]:
        """Each layer with what is kept of it."""
        found = [(layer, keep_of(layer.name, keep)) for layer in self.layers]
        for _, kept in found:
            if kept not in KEPT_BY_ROW:
                raise QuestionError(f"keep={kept!r}: expected one of {', '.join(map(repr, KEPT_BY_ROW))}.")
        return found

    def bytes_of_slots(self, keep: Keep = "slots") -> float:
        """How many bytes all chunks take together, without snapshots."""
        by_layer = self._by_layer(keep)
        of_step = sum(layer.vector_bytes for layer, kept in by_layer if layer.is_exact(kept))
        if any(kept != "keys" for _, kept in by_layer):
            of_step += self.step_bytes
        nbytes = self.rows / self.every * self.bytes_per_row(keep) + self.steps * of_step
        # Each snapshot seals a chunk
        chunks = max(1 + nbytes // self.chunk_bytes, 1 + self._snapshots_between(keep, nbytes))
        return nbytes + chunks * (CHUNK_HEADERS + LAYER_HEADERS * len(self.layers))

    def curvature(self, keep: Keep = "slots") -> int:
        """How many numbers of curvature are counted."""
        summed = [(layer, kept) for layer, kept in self._by_layer(keep) if kept in SUMMED]
        if sum(layer.curvature[kept] for layer, kept in summed) > MOST_NUMBERS:
            return 0
        return sum(layer.curvature[kept] for layer, kept in summed if layer.is_summed[kept])

    def bytes_of_snapshot(self, keep: Keep = "slots") -> int:
        """How many bytes each snapshot takes, with the curvature that is counted where slots are summed."""
        tensors = 3 * len(self.layers) if self.curvature(keep) else 0
        return self.weight_bytes + self.state_bytes + 4 * self.curvature(keep) + tensors * TENSOR_HEADER

    def snapshots(self, keep: Keep = "slots") -> int:
        """How many snapshots there are: before and after, and in between as many as finished.py takes."""
        return 2 + self._snapshots_between(keep, self.bytes_of_slots(keep))

    def _snapshots_between(self, keep: Keep, nbytes: float) -> int:
        by_layer = self._by_layer(keep)
        is_exact = self.every == 1 and all(layer.is_exact(kept) for layer, kept in by_layer)
        if is_exact or keep == "keys":
            apart = max(SNAPSHOT_SHARE * self.bytes_of_snapshot(keep), SNAPSHOT_CHUNKS * self.chunk_bytes)
            return int(nbytes // apart)
        apart = SHARE_IF_NOT_REBUILT * self.bytes_of_snapshot(keep)
        return min(int(nbytes // apart), self.steps // STEPS_APART)

    def nbytes(self, keep: Keep = "slots") -> float:
        """How many bytes the recording takes, snapshots included."""
        return self.bytes_of_slots(keep) + self.bytes_of_snapshots(keep)

    def bytes_of_snapshots(self, keep: Keep = "slots") -> int:
        """How many bytes all snapshots take together."""
        count = self.snapshots(keep)
        return self.weight_bytes + (count - 1) * self.bytes_of_snapshot(keep)

    @property
    def bytes_per_group(self) -> int:
        """How many bytes totals take for each group (key sums and deltas), whatever the number of rows."""
        return sum(4 * layer.numbers_per_group for layer in self.layers)

    def memory(self, keep: Keep = "slots") -> float:
        """How much memory recording takes beside training, at most: the queue, as much in buffers kept for reuse, two open steps, curvature."""
        return 2 * self.queue_bytes + 2 * self.batch * self.bytes_per_row(keep) + 8 * self.curvature(keep)

    @property
    def frame(self) -> pl.DataFrame:
        """A line for each layer: how many slots a row has, and how many bytes it takes by what is kept."""
        lines = []
        for layer in self.layers:
            sizes = {f"{keep}_bytes": layer.bytes_per_row[keep] for keep in KEPT_BY_ROW}
            lines.append({"layer": layer.name, "kind": layer.kind, "slots": layer.slots, **sizes})
        return pl.DataFrame(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        kept = {
            keep: {
                "bytes_per_row": self.bytes_per_row(keep),
                "bytes": self.nbytes(keep),
                "snapshots": self.snapshots(keep),
                "memory": self.memory(keep),
            }
            for keep in KEPT_BY_ROW
        }
        return {
            "rows": self.rows,
            "batch": self.batch,
            "steps": self.steps,
            "dtype": self.dtype,
            "keep": kept,
            "bytes_per_group": self.bytes_per_group,
            "weight_bytes": self.weight_bytes,
            "state_bytes": self.state_bytes,
            "time_factor": self.time_factor,
            "layers": self.frame.to_dicts(),
        }

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows in {self.steps:,} steps, {len(self.layers)} layers, {self.dtype}"]
        lines += [self._line(keep) for keep in KEPT_BY_ROW]
        lines.append(f'keep="totals": {size_text(self.bytes_per_group)} a group')
        lines.append(f"time: about {self.time_factor:.1f} × bare training (rough)")
        return "\n".join(lines)

    def _line(self, keep: str) -> str:
        disk = f"{size_text(self.bytes_per_row(keep))} a row, {size_text(self.nbytes(keep))} in all"
        return f'keep="{keep}": {disk}, {size_text(self.memory(keep))} of memory at most'


def estimate(
    model: nn.Module,
    example: Any = None,
    *,
    rows: int,
    positions: int | None = None,
    batch: int = 1,
    samples: int | None = None,
    dtype: str | None = None,
    projection: int = DEFAULT_SIZE,
    every: int = 1,
    layers: str | Collection[str] | None = None,
    exclude: str | Collection[str] | Mapping[str, str] = (),
    outputs: Mapping[str, Sequence[int]] | None = None,
    states: int = 2,
    queue_bytes: int = 256 << 20,
    chunk_bytes: int = 64 << 20,
) -> Estimate:
    """Estimate the disk, memory and time that `record()` will take, for every `keep`. Nothing is trained or written.

    The model runs once, in evaluation mode, on the device that its parameters are on; on the meta device that takes no memory.
    example: a batch of its inputs (a tensor, a tuple of arguments or a dictionary of them; the first axis is that of rows). Without it, the
    model is one of tokens, and `positions` says how many a row has. rows: how many are trained on, over all epochs; batch: how many make
    an update. samples: how many of the rows are distinct, whose inputs are stored once; default: all. projection, every: as for `record()`. states: how many tensors
    of its size the optimizer holds for a weight: 2 for Adam, 1 for SGD with momentum. The others: as for `record()`.
    """
    for name, number in (("rows", rows), ("batch", batch), ("projection", projection), ("every", every)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise QuestionError(f"{name}={number!r}: expected a whole number of at least 1.")
    if dtype not in (None, *DTYPES):
        raise QuestionError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, DTYPES))}.")
    if (example is None) == (positions is None):
        raise QuestionError(
            "estimate() needs either example=, a batch of the model's inputs, or positions=, of a model of tokens."
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    choice = choose(model, [SGD(trained, lr=0.0)], layers, exclude)
    choice.recorded = keep_outputs(choice.recorded, outputs)
    if dtype is None:
        is_double = any(parameter.dtype == torch.float64 for parameter in trained)
        dtype = "float64" if is_double else "float32"
    repeated = 1.0 if samples is None else min(1.0, samples / rows)
    sizes = _sizes_per_row(model, choice, example, positions)
    vectors = _vector_bytes(choice)
    return Estimate(
        rows=rows,
        batch=batch,
        dtype=dtype,
        layers=[
            replace(_estimated(one, dtype, batch, repeated, projection), vector_bytes=vectors[one.layer.name])
            for one in sizes
        ],
        step_bytes=UPDATE_BYTES * len({name for chosen in choice.recorded for name in chosen.parameters}),
        weight_bytes=_weight_bytes(model),
        state_bytes=states * _recorded_bytes(choice),
        time_factor=_time_factor(sizes),
        queue_bytes=queue_bytes,
        chunk_bytes=chunk_bytes,
        every=every,
    )


def _sizes_per_row(model: nn.Module, choice: Choice, example: Any, positions: int | None) -> list[LayerSizes]:
    if positions is not None:
        device = next(model.parameters()).device
        example = torch.zeros(1, positions, dtype=torch.int64, device=device)
    count = _count_rows(example)
    found = layer_sizes(model, choice.recorded, example, count, is_real=positions is None)
    return [sizes.per_row(count) for sizes in found]


def _count_rows(example: Any) -> int:
    if isinstance(example, Mapping):
        example = list(example.values())
    tensors = [example] if isinstance(example, Tensor) else [one for one in example if isinstance(one, Tensor)]
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        raise QuestionError(
            f"example={type(example).__name__}: expected a tensor, a tuple of the model's arguments or a dictionary of them, with at least "
            f"one row."
        )
    return len(tensors[0])


def _estimated(sizes: LayerSizes, dtype: str, batch: int, repeated: float, projection: int) -> LayerEstimate:
    layer = sizes.layer
    number = TORCH[dtype].itemsize
    exponent = 2 if dtype == "float16" else 0  # a power of two for each vector
    block = sizes.calls * BLOCK_BYTES / batch
    outputs = layer.kept_outputs
    errors = sizes.slots * (outputs * number + exponent)
    keys = _bytes_of_keys(sizes, number, exponent, repeated)
    slots = block + keys + errors
    weights = outputs * layer.gradient_width if layer.bilinear() else 0
    is_summed = {"rows": _is_summed(sizes), "projected": _is_summed(sizes)}
    curvature = {"rows": curvature_sizes([layer]), "projected": curvature_sizes([layer])}
    of_row = _bytes_of_row(sizes, block, number, exponent) if is_summed["rows"] else slots
    of_projected = of_row
    seen = _projected(sizes, projection)
    if seen is not None:
        is_summed["projected"] = _is_summed(seen) or seen.slots > sizes.slots
        curvature["projected"] = curvature_sizes([seen.layer])
        of_slots = block + seen.slots * ((seen.layer.d_in + seen.layer.d_out) * number + 2 * exponent)
        of_projected = _bytes_of_row(seen, block, number, exponent) if is_summed["projected"] else of_slots
    return LayerEstimate(
        name=layer.name,
        kind=layer.kind,
        slots=sizes.slots,
        bytes_per_row={
            "slots": slots,
            "rows": of_row,
            "projected": of_projected,
            "keys": block + keys,
        },
        numbers_per_group=layer.d_in * layer.attends + 2 * weights,
        curvature=curvature,
        is_summed=is_summed,
        is_projected=seen is not None,
        vector_bytes=0.0,
    )


def _projected(sizes: LayerSizes, projection: int) -> LayerSizes | None:
    """The same slots as keep="projected" has them; None: it leaves them as they are."""
    stored = projected_layer(sizes.layer, projection, 0)
    if stored.projected_from is None:
        return None
    groups = SlotViews.of(stored).groups
    slots = sizes.slots * groups
    return LayerSizes(stored, slots, slots, slots * stored.d_in, sizes.most_slots * groups, sizes.calls)


def _bytes_of_keys(sizes: LayerSizes, number: int, exponent: int, repeated: float) -> float:
    if sizes.layer.form == "numbers":
        return 4.0 * sizes.keys
    each_once = sizes.key_numbers * number + sizes.keys * exponent
    if sizes.is_data:
        return each_once * repeated + sizes.slots * KEY_NUMBER
    return 0.0 if sizes.shares_keys else each_once


def _is_summed(sizes: LayerSizes) -> bool:
    """Whether the slots of a row are summed. Those of an embedding are where numbers are equal, if the example tells."""
    layer = sizes.layer
    if sizes.most_slots <= 1:
        return False
    if layer.form == "numbers":
        return sizes.distinct is not None and sizes.distinct < sizes.most_slots
    if layer.form == "parts":
        return True
    numbers = sizes.key_numbers + sizes.slots * layer.kept_outputs
    return is_smaller(layer, numbers / sizes.calls)


def _bytes_of_row(sizes: LayerSizes, block: float, number: int, exponent: int) -> float:
    """What a row takes whose slots are summed."""
    layer = sizes.layer
    if layer.form == "numbers":
        assert sizes.distinct is not None
        return block + sizes.calls * sizes.distinct * (4 + layer.kept_outputs * number + exponent)
    if layer.form == "parts":
        summed = (layer.d_in + layer.kept_outputs) * number + 2 * exponent
    else:
        summed = layer.gradient_size * number + exponent
    return block + sizes.calls * (summed + 24 * block / BLOCK_BYTES)


def _vector_bytes(choice: Choice) -> dict[str, float]:
    """By layer: what the gradients of biases and elementwise weights take in an update. Those that layers share count once."""
    found: dict[str, float] = {}
    counted: set[str] = set()
    for chosen in choice.recorded:
        for layer in chosen.layers:
            new = layer.vectors() - counted
            counted |= new
            found[layer.name] = sum(4.0 * chosen.parameters[name].numel() for name in new)
    return found


def _weight_bytes(model: nn.Module) -> int:
    """Of buffers, and of weights that training can change. Frozen ones are in the first snapshot at most."""
    total = sum(buffer.nbytes + TENSOR_HEADER for buffer in model.buffers())
    return total + sum(_stored_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)


def _recorded_bytes(choice: Choice) -> int:
    recorded = {id(one): one for chosen in choice.recorded for one in chosen.parameters.values()}
    return sum(_stored_bytes(parameter) for parameter in recorded.values() if parameter.requires_grad)


def _stored_bytes(parameter: nn.Parameter) -> int:
    """bfloat16 is stored as float32."""
    size = 4 if parameter.dtype == torch.bfloat16 else parameter.itemsize
    return size * parameter.numel() + TENSOR_HEADER


def _time_factor(sizes: Sequence[LayerSizes]) -> float:
    has_maps = any(one.layer.geometry is not None for one in sizes)
    return TIME_FACTORS["convolutions" if has_maps else "transformer"]
