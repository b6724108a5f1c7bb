"""Damage the bytes of a store at random: each damage must be refused with a StoreError, or leave all answers as they were.

A case is a batch of mutations in a forked child, on stores of every kind in a RAM disk. For each mutation

1. the files are changed and the store is opened and every changed file is read in full by the reader's own code: manifest,
   sizes, headers, tables, tensors, with all their checksums. Nearly all mutations end here, with an error;
2. if that raised nothing, all questions are asked (answers.py), and every answer must be the same text as before;
3. of those that were refused, one in SAMPLED is also asked all questions, since a question must raise the same kind of error.

A manifest that was changed but is read as the same manifest (white space) counts as harmless without step 2.
Hangs, crashes, large allocations and errors of another kind are failures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import dualform
from campaigns import forks, guards
from campaigns.answers import answers
from campaigns.case import Campaign as Base
from campaigns.case import Outcome
from campaigns.guards import guarded, limit_memory
from campaigns.runs import KINDS, Kind, Training
from dualform.errors import DualformError, StoreError
from dualform.store.files import files_at
from dualform.store.format import MANIFEST, ROWS, SLOTS, STEPS, SUMS, UPDATES, Manifest, read_manifest
from dualform.store.reader import Store

BATCH = 1000
SAMPLED = 500

Files = dict[Path, bytes | None]
"""What is written in place of some files; None removes one."""


class Target:
    """A finished store, which is damaged and mended again."""

    def __init__(self, folder: Path, kind: Kind, expected: list[str]):
        """expected: all answers of the store as it is."""
        self.folder = folder
        self.kind = kind
        self.expected = expected
        self.manifest: Manifest = read_manifest(files_at(folder))
        self.content = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        self.types: dict[str, list[Path]] = {}
        for path in self.content:
            if self.content[path]:
                self.types.setdefault(path.name.split("-")[0], []).append(path)

    def draw_file(self, draw: random.Random) -> Path:
        """A file that is not empty: each type of file is as likely, however many there are of it."""
        return draw.choice(self.types[draw.choice(list(self.types))])


def make(folder: Path, kind: Kind) -> list[str]:
    """A store with a few chunks, several snapshots and, built from its slots, totals; gives its answers."""
    training = Training(kind, seed=0)
    settings = {} if not kind.keeps_slots else {"chunk_bytes": 5000}
    with training.record(folder, **settings) as recorder:
        training.go_on(recorder)
    if kind.keeps_slots and not kind.has_totals:
        dualform.build_totals(folder, "label")
    return answers(folder, kind)


Mutation = Callable[[bytes, random.Random, Target], bytes]


def _range(data: bytes, draw: random.Random) -> tuple[int, int]:
    begin = draw.randrange(len(data))
    length = draw.choice([1, 2, 4, 8, 16, 64, 512, 4096])
    return begin, min(len(data), begin + length)


def flip_bit(data: bytes, draw: random.Random, _: Target) -> bytes:
    """One bit."""
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def flip_bits(data: bytes, draw: random.Random, target: Target) -> bytes:
    """Several bits, anywhere."""
    changed = bytearray(data)
    for _ in range(draw.randint(2, 20)):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def zero_range(data: bytes, draw: random.Random, _: Target) -> bytes:
    """A range of zeros, as a block that was never written."""
    begin, end = _range(data, draw)
    return data[:begin] + bytes(end - begin) + data[end:]


def random_range(data: bytes, draw: random.Random, _: Target) -> bytes:
    """A range of other bytes."""
    begin, end = _range(data, draw)
    return data[:begin] + draw.randbytes(end - begin) + data[end:]


def truncate(data: bytes, draw: random.Random, _: Target) -> bytes:
    """The first part alone."""
    return data[: draw.randrange(len(data))]


def append(data: bytes, draw: random.Random, _: Target) -> bytes:
    """More bytes at the end: zeros, random ones, or its own."""
    count = draw.randint(1, 64)
    return data + draw.choice([bytes(count), draw.randbytes(count), data[:count], data])


def delete_range(data: bytes, draw: random.Random, _: Target) -> bytes:
    """Some bytes are missing in the middle."""
    begin, end = _range(data, draw)
    return data[:begin] + data[end:]


def duplicate_range(data: bytes, draw: random.Random, _: Target) -> bytes:
    """A range is written over another one, or is there twice."""
    begin, end = _range(data, draw)
    place = draw.randrange(len(data))
    if draw.random() < 0.5:
        return data[:place] + data[begin:end] + data[place:]
    return (data[:place] + data[begin:end] + data[place + end - begin :])[: len(data)]


def swap_ranges(data: bytes, draw: random.Random, _: Target) -> bytes:
    """Two ranges change places."""
    length = draw.choice([1, 8, 64, 512])
    if len(data) < 2 * length:
        return data[::-1]
    one = draw.randrange(len(data) - 2 * length + 1)
    two = draw.randrange(one + length, len(data) - length + 1)
    changed = bytearray(data)
    changed[one : one + length] = data[two : two + length]
    changed[two : two + length] = data[one : one + length]
    return bytes(changed)


def change_length(data: bytes, draw: random.Random, _: Target) -> bytes:
    """Another number in the first eight bytes, where safetensors has the length of its header."""
    huge = draw.choice(
        [b"\xff" * 8, (len(data) * 1000).to_bytes(8, "little"), bytes(8), (1 << 62).to_bytes(8, "little")]
    )
    return huge + data[8:]


def another_file(data: bytes, draw: random.Random, target: Target) -> bytes:
    """The content of another file."""
    return target.content[target.draw_file(draw)]


MUTATIONS: dict[Mutation, int] = {
    flip_bit: 40,
    flip_bits: 10,
    zero_range: 10,
    random_range: 8,
    truncate: 8,
    append: 4,
    delete_range: 5,
    duplicate_range: 5,
    swap_ranges: 5,
    change_length: 2,
    another_file: 3,
}
"""Each kind, and how often it comes."""


class Campaign(Base):
    """Mutations, in batches."""

    name = "mutate"
    unit = "mutations"
    goal = 1_000_000

    def __init__(self, folder: Path):
        self._targets = {}
        for name, kind in KINDS.items():
            path = folder / name.replace(" ", "-")
            self._targets[name] = Target(path, kind, forks.call(partial(make, path, kind)))

    def run(self, draw: random.Random, number: int) -> Outcome:
        """One batch."""
        target = self._targets[draw.choice(list(self._targets))]
        try:
            return forks.call(partial(_batch, target, draw), seconds=BATCH * guards.SECONDS)
        except forks.ChildError as error:
            outcome = Outcome()
            outcome.fail(f"{target.kind.name}: {error}", target.folder)
            for path, data in target.content.items():
                path.write_bytes(data)
            return outcome


def _batch(target: Target, draw: random.Random) -> Outcome:
    outcome = Outcome()
    limit_memory()
    for number in range(BATCH):
        kind, files = _draw(target, draw)
        changed = {path: data for path, data in files.items() if data != target.content[path]}
        if not changed:
            continue
        names = ", ".join(f"{path.relative_to(target.folder)}" for path in changed)
        _write(changed)
        try:
            result = guarded(partial(_judge, target, list(changed), number))
        except Exception as error:
            outcome.fail(
                f"{target.kind.name}, number {number}, {kind} of {names}: {type(error).__name__}: {error}",
                target.folder,
            )
            result = "failed"
        finally:
            _write({path: target.content[path] for path in changed})
        outcome.counts["mutations"] += 1
        outcome.counts["asked all questions"] += result == "harmless" or number % SAMPLED == 0
        outcome.counts[f"{kind}: {result}"] += 1
        for path in changed:
            outcome.counts[f"of {path.name.split('-')[0]}"] += 1
    return outcome


def _draw(target: Target, draw: random.Random) -> tuple[str, Files]:
    """What is done to which files."""
    several = draw.random()
    if several < 0.02:
        return "remove", {target.draw_file(draw): None}
    if several < 0.05:
        one, two = target.draw_file(draw), target.draw_file(draw)
        return "exchange two files", {one: target.content[two], two: target.content[one]}
    mutation = draw.choices(list(MUTATIONS), list(MUTATIONS.values()))[0]
    count = 1 if several < 0.95 else draw.randint(2, 5)
    paths = [target.draw_file(draw) for _ in range(count)]
    name = mutation.__name__.replace("_", " ")
    return name, {path: mutation(target.content[path], draw, target) for path in paths}


def _write(files: Files) -> None:
    for path, data in files.items():
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)


def _judge(target: Target, changed: Sequence[Path], number: int) -> str:
    """What becomes of a mutation; raises whatever is no StoreError."""
    try:
        store = Store(files_at(target.folder))
        for path in changed:
            _read(store, path)
    except StoreError as error:
        if number % SAMPLED == 0:
            _check_refusal(target)
        return type(error).__name__
    if store.manifest == Store(files_at(target.folder), target.manifest).manifest and [
        path.name for path in changed
    ] == [MANIFEST]:
        return "harmless"
    return _answers_as_before(target)


def _check_refusal(target: Target) -> None:
    """What cannot be read must not be answered from."""
    try:
        found = answers(target.folder, target.kind)
    except DualformError:
        return
    if found != target.expected:
        raise AssertionError("the answers are others, though a file of the store cannot be read")


def _answers_as_before(target: Target) -> str:
    try:
        found = answers(target.folder, target.kind)
    except StoreError as error:
        return f"{type(error).__name__} by a question"
    if found != target.expected:
        raise AssertionError("the answers are others")
    return "harmless"


def _read(store: Store, path: Path) -> None:
    """Read all of a file, as the questions do, so that every checksum in it is compared."""
    folder, name = path.parent.name, path.name
    if name == SLOTS:
        place = int(folder.removeprefix("chunk-"))
        parts = [store.chunk_of(layer.name, place) for layer in store.manifest.layers]
        for part in parts:
            if part is not None:
                for tensor in part.file:
                    part.file[tensor]
    elif name == ROWS:
        store.rows_in(int(folder.removeprefix("chunk-")))
    elif name == UPDATES:
        store.updates_in(int(folder.removeprefix("chunk-")))
    elif name == STEPS:
        len(store.log)
    elif name == SUMS:
        file = store.totals()
        for tensor in file:
            file[tensor]
    elif name.startswith("groups-"):
        store.groups(int(name.removeprefix("groups-").removesuffix(".parquet")))
    elif name.startswith("snapshot-"):
        file = store.snapshot(int(name.removeprefix("snapshot-").removesuffix(".safetensors")))
        for tensor in file:
            file[tensor]
