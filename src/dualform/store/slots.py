"""The slots of one layer in one chunk: their addresses, keys and error signals, as far as they count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Bools, Ints
from dualform.errors import NotRecordedError, StoreDamagedError
from dualform.layers.keys import Keys, KeysOrGradients, OneHot, Patches, RowGradients, Vectors
from dualform.layers.layer import Layer
from dualform.store.consistency import check_blocks, check_sums
from dualform.store.encoding import Encoded, decode
from dualform.store.format import NO_ROW, Chunk, Manifest
from dualform.store.labels import Label
from dualform.store.tensors import TensorFile

N = TypeVar("N", bound=np.generic)
PIECE_BYTES = 8 << 20
"""How much of a chunk is decoded at a time: the C library uses memory of this size again, fresh pages would cost as much as decoding."""


class KeyStore(Protocol):
    """What holds the keys of all chunks."""

    @property
    def manifest(self) -> Manifest:
        """What the store says of itself."""

    def gather(self, number: int, what: str, wanted: Ints, dtype: torch.dtype) -> Tensor:
        """Keys of a layer by their numbers."""


@dataclass(frozen=True)
class SlotChunk:
    """The slots of one layer in one chunk. Slot i of the chunk has the number first_slot + i in the layer."""

    store: KeyStore
    file: TensorFile
    number: int
    layer: Layer
    chunk_number: int
    """The chunk's place among all chunks of the store."""
    first_slot: int
    end_key: int
    """Its slots name only keys with a lower number: those of this chunk and of chunks before it."""
    chunk: Chunk
    written: Label
    """What the chunk's files hold, which may be more than what counts."""
    end_step: int | None

    @cached_property
    def blocks(self) -> Ints:
        """(blocks, 7): step, backward, call, first_row, rows, positions, arrival; up to end_step."""
        table: Ints = self.file[f"{self.number}.blocks"].numpy()
        try:
            check_blocks(table, self.layer, self.written["slots"][self.number], self.written, self.store.manifest)
        except ValueError as error:
            raise self._damaged(str(error)) from None
        table = table[table[:, 0] < self.chunk.end_step]
        if int((table[:, 4] * table[:, 5]).sum()) != self.chunk.slots[self.number]:
            raise self._damaged(f"the blocks of {self.layer.name!r} do not add up")
        return table if self.end_step is None else table[table[:, 0] < self.end_step]

    def _damaged(self, why: str) -> StoreDamagedError:
        return StoreDamagedError(f"{self.file.path} is damaged: {why}.")

    @cached_property
    def counts(self) -> Ints:
        """(blocks,): how many slots each block has."""
        counts: Ints = self.blocks[:, 4] * self.blocks[:, 5]
        return counts

    @cached_property
    def slots(self) -> int:
        """How many slots there are, up to end_step."""
        return int(self.counts.sum())

    @cached_property
    def sums(self) -> Ints | None:
        """(blocks, 3): how the slots of each block were summed row by row (SUM_FIELDS); None: all slots are there."""
        name = f"{self.number}.sums"
        if name not in self.file:
            return None
        whole: Ints = self.file[name].numpy()
        table = whole[: len(self.blocks)]
        try:
            check_sums(table, self.blocks, self.layer)
            self._check_gradients(whole)
        except ValueError as error:
            raise self._damaged(str(error)) from None
        return table

    def _check_gradients(self, sums: Ints) -> None:
        """Whether there are as many gradients as the blocks say, those that no longer count included."""
        blocks: Ints = self.file[f"{self.number}.blocks"].numpy()
        told = int((blocks[:, 4] * blocks[:, 5])[sums[:, 0] == 1].sum())
        name = f"{self.number}.gradients"
        found = self.file.shape(name)[0] if name in self.file else 0
        if told != found:
            raise ValueError(f"{self.layer.name!r} has {found} gradients of rows, its blocks say {told}")

    @cached_property
    def is_summed(self) -> bool:
        """Whether the slots of any row were summed."""
        return self.sums is not None and bool((self.holds_gradients | (self.sums[:, 1] != self.blocks[:, 5])).any())

    @cached_property
    def holds_gradients(self) -> Bools:
        """(blocks,): which blocks hold the gradients of rows, and no keys and error signals."""
        if self.sums is None:
            return np.zeros(len(self.blocks), np.bool_)
        found: Bools = self.sums[:, 0] == 1
        return found

    @cached_property
    def written_counts(self) -> Ints:
        """(blocks,): how many slots of each block wrote something, before any were summed."""
        if self.sums is not None:
            of_sums: Ints = self.sums[:, 2]
            return of_sums
        if self.silent is None:
            return self.counts
        written_before = np.append(0, np.cumsum(~self.silent))
        found: Ints = written_before[self.starts + self.counts] - written_before[self.starts]
        return found

    @cached_property
    def _stored_before(self) -> Ints:
        """(blocks,): of the slots before each block, how many are stored in the same way as its own: as gradients, or as slots."""
        of_gradients = np.where(self.holds_gradients, self.counts, 0)
        of_slots = self.counts - of_gradients
        before = np.where(self.holds_gradients, np.cumsum(of_gradients), np.cumsum(of_slots)) - self.counts
        found: Ints = before
        return found

    def is_gradient(self, low: int, high: int) -> bool:
        """Whether the slots low to high are the gradients of rows. Stretches that `pieces` gives are either all so, or none."""
        if self.sums is None or low >= high:
            return False
        first, last = np.searchsorted(self.starts, [low, high - 1], side="right") - 1
        of_blocks = self.holds_gradients[first : last + 1][self.counts[first : last + 1] > 0]
        if of_blocks.any() and not of_blocks.all():
            raise AssertionError(f"slots {low} to {high} are stored in two ways")
        return bool(of_blocks.any())

    def _stored(self, low: int, high: int) -> slice:
        """Where the slots low to high, stored in one way, lie among those that are."""
        if self.sums is None or low >= high:
            return slice(low, high)
        block = int(np.searchsorted(self.starts, low, side="right")) - 1
        first = int(self._stored_before[block]) + low - int(self.starts[block])
        return slice(first, first + high - low)

    @cached_property
    def shared(self) -> Bools | None:
        """(blocks,): which blocks serve all rows at once, so that their slots have no row; None: no block does."""
        found: Bools = self.blocks[:, 3] == NO_ROW
        return found if found.any() else None

    @cached_property
    def row_range(self) -> tuple[int, int]:
        """The number of its first row, and of the one after its last."""
        blocks = self.blocks if self.shared is None else self.blocks[~self.shared]
        if not len(blocks):
            return 0, 0
        first_rows = blocks[:, 3]
        end_rows = first_rows + blocks[:, 4]
        return int(first_rows.min()), int(end_rows.max())

    def per_slot(self, values: np.ndarray[Any, np.dtype[N]]) -> np.ndarray[Any, np.dtype[N]]:
        """(blocks,) → (slots,)."""
        return np.repeat(values, self.counts)

    @property
    def place(self) -> Ints:
        """(slots,): the place of each slot within its block."""
        place: Ints = np.arange(self.slots) - self.per_slot(self.starts)
        return place

    def rows(self) -> Ints:
        """(slots,): the number of each slot's row; NO_ROW for slots that serve all rows."""
        positions = self.blocks[:, 5]
        within = self.place if (positions == 1).all() else self.place // self.per_slot(positions)
        rows: Ints = self.per_slot(self.blocks[:, 3]) + within
        return rows

    def positions(self) -> Ints:
        """(slots,): each slot's position within its row, or within its block if it has none."""
        positions: Ints = self.place % self.per_slot(self.blocks[:, 5])
        return positions

    @property
    def slots_with_keys(self) -> int:
        """How many slots have a key; gradients of rows have none."""
        return self.slots - int(self.counts[self.holds_gradients].sum())

    @cached_property
    def key_numbers(self) -> Ints | None:
        """(slots,): the number of each slot's key among the stored ones; None: each slot has its own, in order. Gradients have none."""
        name = f"{self.number}.key_numbers"
        if name not in self.file:
            return None
        numbers: Ints = self.file[name][: self.slots_with_keys].numpy()
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self.end_key):
            raise self._damaged(f"a slot of {self.layer.name!r} names a key that is not there")
        return numbers

    @cached_property
    def silent(self) -> Bools | None:
        """(slots,): which slots wrote nothing, because their error signal is zero; None: no slot did, as far as is known."""
        name = f"{self.number}.silent"
        if name not in self.file:
            return None
        flags: Bools = self.file[name][: self.slots].numpy()
        return flags if flags.any() else None

    @cached_property
    def starts(self) -> Ints:
        """(blocks,): where the slots of each block begin."""
        starts: Ints = np.cumsum(self.counts) - self.counts
        return starts

    @cached_property
    def shapes(self) -> Ints:
        """(blocks, …), for feature maps: how many there are for each row, and their size."""
        shapes: Ints = self.file[f"{self.number}.shapes"].numpy()[: len(self.blocks)]
        self._check_maps(shapes)
        return shapes

    def _check_maps(self, shapes: Ints) -> None:
        """Whether there are as many feature maps, and patches in them, as the blocks say."""
        geometry = self.layer.geometry
        assert geometry is not None
        maps = 0
        numbers = 0
        rows_and_positions = self.blocks[:, 4:6].tolist()
        holds_gradients = self.holds_gradients.tolist()
        for (each, *size), (rows, positions), is_gradient in zip(
            shapes.tolist(), rows_and_positions, holds_gradients, strict=True
        ):
            if is_gradient:
                continue
            patches = math.prod(geometry.positions(tuple(size)))
            if each < 0 or min(size) < 0 or each * patches != positions:
                raise self._damaged(f"the feature maps of {self.layer.name!r} do not have as many patches as slots")
            maps += rows * each
            numbers += rows * each * geometry.channels * math.prod(size)
        name = f"{self.number}.keys"
        stored = self.file.shape(name)[0] if name in self.file else 0  # none, if all blocks hold gradients
        if maps > self.written["keys"][self.number] or numbers > stored:
            raise self._damaged(f"there are fewer feature maps of {self.layer.name!r} than its slots need")

    @property
    def stored_keys(self) -> int:
        """How many keys its own slots have in store, where each has one."""
        if self.layer.form != "maps":
            return self.slots_with_keys
        maps = self.blocks[:, 4] * self.shapes[:, 0]
        return int(maps[~self.holds_gradients].sum())

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """Cut the chunk into stretches of slots that decode to at most PIECE_BYTES; feature maps are not cut through.

        The gradients of rows, which take more numbers than a slot, have stretches of their own.
        """
        size = _at_a_time(width)
        if self.layer.form != "maps":
            for begin, end, is_gradient in self._stretches():
                step = min(size, _at_a_time(self.layer.gradient_size)) if is_gradient else size
                for low in range(begin, end, step):
                    yield low, min(low + step, end)
            return
        for start, (rows, positions) in zip(self.starts.tolist(), self.blocks[:, 4:6].tolist(), strict=True):
            rows_at_a_time = max(1, size // max(positions, 1))
            for low in range(0, rows, rows_at_a_time):
                high = min(low + rows_at_a_time, rows)
                yield start + low * positions, start + high * positions

    def _stretches(self) -> Iterator[tuple[int, int, bool]]:
        """Cut the chunk where blocks of slots and blocks of gradients meet: (first slot, end, whether these are gradients)."""
        if self.sums is None:
            yield 0, self.slots, False
            return
        filled = np.flatnonzero(self.counts > 0)
        changes = np.flatnonzero(np.diff(self.holds_gradients[filled])) + 1
        for blocks in np.split(filled, changes):
            if len(blocks):
                end = int(self.starts[blocks[-1]] + self.counts[blocks[-1]])
                yield int(self.starts[blocks[0]]), end, bool(self.holds_gradients[blocks[0]])

    def some_pieces(self, places: Ints, width: int) -> Iterator[Ints]:
        """Cut some of its slots (vectors, by their places) in the same way."""
        size = _at_a_time(width)
        return (places[low : low + size] for low in range(0, len(places), size))

    def whole(self, slot: int) -> tuple[int, int]:
        """The shortest stretch around a slot that can be read: of feature maps, all positions of its row."""
        if self.layer.form != "maps":
            return slot, slot + 1
        block = int(np.searchsorted(self.starts, slot, side="right")) - 1
        start = int(self.starts[block])
        positions = int(self.blocks[block, 5])
        low = start + (slot - start) // positions * positions
        return low, low + positions

    def pairs(self, dtype: torch.dtype, low: int, high: int) -> tuple[KeysOrGradients, Tensor]:
        """The keys and error signals of the slots low to high; of the gradients of rows, these and the number 1 for each, (rows, 1)."""
        if not self.is_gradient(low, high):
            return self.keys(dtype, low, high), self.errors(dtype, low, high)
        stored = self._encoded("gradient")
        here = self._stored(low, high)
        gradients = decode(stored.data[here], stored.scales(here), dtype)
        return RowGradients.of(self.layer, gradients), gradients.new_ones(high - low, 1)

    def _refuse_gradients(self, low: int, high: int, what: str) -> None:
        if self.is_gradient(low, high):
            raise NotRecordedError(
                f'layer {self.layer.name!r} keeps the gradients of whole rows (keep="rows"), and no {what} of single slots. Record with '
                f'keep="slots" to ask for them.'
            )

    def keys(self, dtype: torch.dtype, low: int = 0, high: int | None = None) -> Keys:
        """The keys of the slots low to high; a mapped view if the stored type is the one asked for."""
        high = self.slots if high is None else high
        self._refuse_gradients(low, high, "keys")
        if self.layer.form == "maps":
            return self._maps(dtype, low, high)
        here = self._stored(low, high)
        if self.layer.form == "numbers":
            return OneHot(self._places[here], self.layer.d_in, dtype)
        if self.key_numbers is not None:
            return Vectors(self.store.gather(self.number, "key", self.key_numbers[here], dtype))
        stored = self._encoded("key")
        return Vectors(decode(stored.data[here], stored.scales(here), dtype))

    @cached_property
    def _places(self) -> Tensor:
        """(slots, 1): the places of the ones in one-hot keys; −1: a key of zeros."""
        places = self.file[f"{self.number}.keys"]
        if len(places) and not (int(places.min()) >= -1 and int(places.max()) < self.layer.d_in):
            raise self._damaged(f"a key of {self.layer.name!r} is not among its {self.layer.d_in} inputs")
        return places

    def some_keys(self, places: Ints, dtype: torch.dtype) -> Tensor:
        """The keys (vectors) of some slots, by their places in ascending order."""
        if self.key_numbers is not None:
            return self.store.gather(self.number, "key", self.key_numbers[places], dtype)
        return self._encoded("key").some(torch.from_numpy(places), dtype)

    def some_errors(self, places: Ints, dtype: torch.dtype) -> Tensor:
        """Their error signals."""
        return self._encoded("error").some(torch.from_numpy(places), dtype)

    def _maps(self, dtype: torch.dtype, low: int, high: int) -> Patches:
        """Return the feature maps of some rows of one block; they lie one after the other, flat, and blocks differ in their size."""
        geometry = self.layer.geometry
        assert geometry is not None
        block = int(np.searchsorted(self.starts, low, side="right")) - 1
        while self.counts[block] == 0 and block + 1 < len(self.starts) and low < high:
            block += 1
        start = int(self.starts[block])
        positions = max(int(self.blocks[block, 5]), 1)
        each, *size = self.shapes[block].tolist()
        first_map = (low - start) // positions * each
        count = (high - start) // positions * each - first_map
        # All blocks: how many maps each has, and how many numbers a map has
        maps = np.where(self.holds_gradients, 0, self.blocks[:, 4] * self.shapes[:, 0])
        widths = geometry.channels * self.shapes[:, 1:].prod(1)
        width = int(widths[block])
        begin = int((maps * widths)[:block].sum()) + first_map * width
        flat = self.file[f"{self.number}.keys"][begin : begin + count * width].reshape(count, width)
        name = f"{self.number}.key_exponents"
        exponents = None
        if name in self.file:
            first = int(maps[:block].sum()) + first_map
            exponents = self.file[name][first : first + count]
        decoded = decode(flat, exponents, dtype)
        return Patches(decoded.reshape(count, geometry.channels, *size), geometry)

    def errors(self, dtype: torch.dtype, low: int = 0, high: int | None = None) -> Tensor:
        """(slots, d_out), of the slots low to high."""
        high = self.slots if high is None else high
        self._refuse_gradients(low, high, "error signals")
        here = self._stored(low, high)
        stored = self._encoded("error")
        return decode(stored.data[here], stored.scales(here), dtype)

    def _encoded(self, what: str) -> Encoded:
        return stored_vectors(self.file, self.number, what)


def stored_vectors(file: TensorFile, number: int, what: str) -> Encoded:
    """Return a layer's keys, error signals or row gradients in a file, without exponents if all of them are zero. what: "key", "error" or "gradient"."""
    name = f"{number}.{what}_exponents"
    exponents = file[name] if name in file else None
    is_scaled = exponents is not None and bool(exponents.any())
    return Encoded(file[f"{number}.{what}s"], exponents if is_scaled else None)


def _at_a_time(width: int) -> int:
    return max(1, PIECE_BYTES // (8 * max(width, 1)))
