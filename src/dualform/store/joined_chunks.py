"""The chunks of several shards as one: its slots are in the order (step, rank), and its rows, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Ints
from dualform.store.format import NO_ROW
from dualform.store.joined import JoinedTensor
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.tensors import TensorFile

MERGED = ("blocks", "sums", "shapes")
"""Tables with a line for each block."""


@dataclass(frozen=True)
class Part:
    """What a shard has of a chunk of the run: some of its chunks, one after the other."""

    rank: int
    store: Store
    places: range

    @cached_property
    def first_row(self) -> int:
        """The number of its first row in the shard."""
        return self.store.manifest.chunks[self.places[0]].first_row

    @cached_property
    def row_steps(self) -> Ints:
        """(rows,): the step of each of its rows."""
        steps = [self.store.rows_in(place)["step"].to_numpy() for place in self.places]
        return np.concatenate(steps).astype(np.int64)

    def chunks(self, layer: str) -> list[SlotChunk]:
        """Return the slots of a layer, chunk by chunk."""
        found = [self.store.chunk_of(layer, place) for place in self.places]
        return [chunk for chunk in found if chunk is not None]


@dataclass(frozen=True)
class KeyNumbers:
    """How a run counts the keys of a layer."""

    are_named: bool
    """Whether slots name their keys by number, since equal keys are stored once. Else keys are in the order of the slots."""
    first_keys: Sequence[Ints]
    """By rank, for each chunk of the shard: the number that its first key has in the run, if they are named."""


def order_of(steps: Sequence[Ints]) -> Ints:
    """Return the places of some entries in the order (step, rank). steps: by rank, the step of each entry, one rank after the other."""
    return np.argsort(np.concatenate(steps), kind="stable")


class JoinedChunk:
    """The slots of a chunk of the run, read like those of one file."""

    def __init__(self, path: str, parts: Sequence[Part], first_row: int, keys: Callable[[int], KeyNumbers]):
        """first_row: the number of its first row in the run.

        keys: of a layer, by its number, how the run counts its keys.
        """
        self.path = path
        self._parts = parts
        self._first_row = first_row
        self._keys = keys
        self._layers: dict[int, JoinedLayer] = {}

    @cached_property
    def row_numbers(self) -> list[Ints]:
        """By rank: the number in the run of each row of its part, (rows,)."""
        steps = [part.row_steps for part in self._parts]
        order = order_of(steps)
        numbers = np.empty(len(order), np.int64)
        numbers[order] = self._first_row + np.arange(len(order))
        ends = np.cumsum([len(some) for some in steps])
        return np.split(numbers, ends[:-1])

    def _layer(self, number: int) -> JoinedLayer:
        if number not in self._layers:
            self._layers[number] = JoinedLayer(number, self._parts, self.row_numbers, self._keys(number))
        return self._layers[number]

    def __contains__(self, name: str) -> bool:
        layer, what = name.split(".")
        if layer == "gradient":
            return any(name in file for file in self._files_of_first())
        return self._layer(int(layer)).has(what)

    def __getitem__(self, name: str) -> Any:
        layer, what = name.split(".")
        if layer == "gradient":  # after it was averaged, it is the same on every rank
            return torch.cat([file[name] for file in self._files_of_first() if name in file])
        return self._layer(int(layer)).tensor(what)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self[name].shape)

    def _files_of_first(self) -> Iterator[TensorFile]:
        first = self._parts[0]
        return (first.store.chunk_file(place) for place in first.places)


class JoinedLayer:
    """The slots of one layer in a chunk of the run."""

    def __init__(self, number: int, parts: Sequence[Part], row_numbers: Sequence[Ints], keys: KeyNumbers):
        self._number = number
        self._keys = keys
        self._row_numbers = row_numbers
        self._parts = parts
        name = parts[0].store.manifest.layers[number].name
        self._chunks: list[tuple[Part, SlotChunk]] = []
        for part in parts:
            self._chunks += [(part, chunk) for chunk in part.chunks(name)]
        self._form = parts[0].store.manifest.layers[number].form
        self._order = order_of([chunk.blocks[:, 0] for _, chunk in self._chunks]) if self._chunks else np.zeros(0, int)

    def _name(self, what: str) -> str:
        return f"{self._number}.{what}"

    def has(self, what: str) -> bool:
        """Whether there is such a tensor."""
        if what == "key_numbers":
            return self._keys.are_named and bool(self._chunks)
        return any(self._name(what) in chunk.file for _, chunk in self._chunks)

    def tensor(self, what: str) -> Tensor | JoinedTensor:
        """Return a tensor: keys, error signals and gradients as they lie in the files, and tables put together."""
        if what in MERGED:
            table = np.concatenate([getattr(self, f"_{what}")(part, chunk) for part, chunk in self._chunks])
            return torch.from_numpy(table[self._order])
        if what == "silent":
            return torch.cat(self._in_order([self._silent(chunk) for _, chunk in self._chunks], self._counts(None)))
        if what == "key_numbers":
            return self._key_numbers()
        if what in ("keys", "key_exponents"):
            return self._stored_keys(what)
        return self._joined(what, self._counts(what.startswith("gradient")))

    def _stored_keys(self, what: str) -> Tensor | JoinedTensor:
        """Keys, or their exponents."""
        if self._keys.are_named:
            return self._keys_of_files(what)
        if self._form == "maps":
            counts = [self._map_counts(chunk, of_numbers=what == "keys") for _, chunk in self._chunks]
            return self._joined(what, counts)
        joined = self._joined(what, self._counts(False))
        return joined.whole() if self._form == "numbers" else joined

    # Tables with a line for each block

    def _blocks(self, part: Part, chunk: SlotChunk) -> Ints:
        """Blocks with the numbers that rows and backward passes have in the run."""
        blocks = chunk.blocks.copy()
        ranks = len(self._parts)
        blocks[:, 1] = blocks[:, 1] * ranks + part.rank
        numbers = self._row_numbers[part.rank]
        has_rows = (blocks[:, 3] != NO_ROW) & (blocks[:, 4] > 0)
        blocks[has_rows, 3] = numbers[blocks[has_rows, 3] - part.first_row]
        is_empty = (blocks[:, 3] != NO_ROW) & (blocks[:, 4] == 0)
        blocks[is_empty, 3] = 0
        return blocks

    def _sums(self, part: Part, chunk: SlotChunk) -> Ints:
        """How slots were summed, also where none were."""
        if chunk.sums is not None:
            return chunk.sums
        none = np.zeros(len(chunk.blocks), np.int64)
        return np.stack([none, chunk.blocks[:, 5], chunk.written_counts], axis=1)

    def _shapes(self, part: Part, chunk: SlotChunk) -> Ints:
        return chunk.shapes

    def _silent(self, chunk: SlotChunk) -> Tensor:
        silent = chunk.silent
        return torch.zeros(chunk.slots, dtype=torch.bool) if silent is None else torch.from_numpy(silent)

    # Vectors

    def _counts(self, of_gradients: bool | None) -> list[Ints]:
        """How many vectors each block has. of_gradients: of blocks that hold gradients, of the others, or of all (None)."""
        counts = []
        for _, chunk in self._chunks:
            takes_part = np.ones(len(chunk.counts), np.bool_)
            if of_gradients is not None:
                takes_part = chunk.holds_gradients == of_gradients
            counts.append(np.where(takes_part, chunk.counts, 0))
        return counts

    def _map_counts(self, chunk: SlotChunk, *, of_numbers: bool) -> Ints:
        """How many feature maps each block has, or how many numbers these have together."""
        maps = np.where(chunk.holds_gradients, 0, chunk.blocks[:, 4] * chunk.shapes[:, 0])
        if not of_numbers:
            return maps
        geometry = chunk.layer.geometry
        assert geometry is not None
        numbers: Ints = maps * geometry.channels * chunk.shapes[:, 1:].prod(1)
        return numbers

    def _joined(self, what: str, counts: Sequence[Ints]) -> JoinedTensor:
        """Join what the files have, block by block in the order of the run."""
        files = [chunk.file for _, chunk in self._chunks]
        present = [file for file in files if self._name(what) in file]
        empty = present[0][self._name(what)][:0]
        stored = [file[self._name(what)] if self._name(what) in file else empty for file in files]
        return JoinedTensor(self._in_order(stored, counts))

    def _in_order(self, stored: Sequence[Tensor], counts: Sequence[Ints]) -> list[Tensor]:
        """Cut tensors into what each block has, in the order of the run."""
        pieces: list[Tensor] = []
        for tensor, of_blocks in zip(stored, counts, strict=True):
            whole = tensor[: int(of_blocks.sum())]
            pieces += torch.split(whole, of_blocks.tolist())
        return [pieces[place] for place in self._order.tolist()]

    # Keys that are stored once for several slots

    def _keys_of_files(self, what: str) -> JoinedTensor:
        """The keys, rank by rank: slots name them by number."""
        pieces = []
        for part in self._parts:
            for place in part.places:
                count = part.store.manifest.chunks[place].keys[self._number]
                if count:
                    pieces.append(part.store.chunk_file(place)[self._name(what)][:count])
        return JoinedTensor(pieces)

    def _key_numbers(self) -> Tensor:
        """The numbers of the keys of all slots, as the run counts keys."""
        numbers = []
        for part, chunk in self._chunks:
            own = chunk.key_numbers
            if own is None:
                first = chunk.end_key - chunk.chunk.keys[self._number]
                own = first + np.arange(chunk.slots_with_keys)
            numbers.append(torch.from_numpy(self._in_the_run(part, own)))
        return torch.cat(self._in_order(numbers, self._counts(False)))

    def _in_the_run(self, part: Part, numbers: Ints) -> Ints:
        """Translate the numbers that a shard gives keys."""
        first_of_shard = part.store.first_keys[:, self._number]
        home = np.searchsorted(first_of_shard, numbers, side="right") - 1
        return self._keys.first_keys[part.rank][home] + numbers - first_of_shard[home]
