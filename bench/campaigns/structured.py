"""Stores that are well formed and inconsistent: every checksum fits, and yet they cannot be what was recorded.

Chunks are duplicated, dropped, reordered or taken from another run; files are exchanged between chunks, runs, snapshots and
totals; counts are edited in the manifest and in the headers of files. All sizes and checksums are corrected afterwards. Each such store must be
refused with a StoreError, when it is opened or by a question, or give the same answers as before.

What is not tried is forgery: another value of a key or of a label, with its checksum, makes another store, and a good one.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import dualform
from campaigns import forks
from campaigns.answers import answers
from campaigns.case import Campaign as Base
from campaigns.case import Outcome
from campaigns.guards import guarded, limit_memory
from campaigns.runs import KINDS, Kind, Training
from dualform.errors import DualformError
from dualform.store import format as store_format
from dualform.store.format import CHUNK_FILES, MANIFEST, SLOTS, checksum

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "store"))
import inconsistent  # type: ignore[import-not-found]

BATCH = 50
KINDS_USED = ("slots", "float16", "words", "maps", "slots and totals", "totals only")

LEFT_BESIDE = (store_format.LOCK, "coefficients-", "curvature-")
"""How files begin that the manifest does not describe."""


@dataclass
class Forgery:
    """A store in memory: the manifest as JSON, and all other files by their path."""

    manifest: dict[str, Any]
    files: dict[str, bytes]

    @staticmethod
    def load(folder: Path) -> Forgery:
        """The store in a folder."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        return Forgery(json.loads((folder / MANIFEST).read_text()), files)

    def copy(self) -> Forgery:
        """One that can be changed."""
        return Forgery(copy.deepcopy(self.manifest), dict(self.files))

    def write(self, folder: Path) -> None:
        """Write it, with the checksum of the manifest corrected."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        content = {name: value for name, value in self.manifest.items() if name != "checksum"}
        signed = {**content, "checksum": store_format._digest(content)}
        (folder / MANIFEST).write_text(json.dumps(signed))
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)

    @property
    def described_files(self) -> list[str]:
        """The files that the manifest describes; not the lock, nor what questions have left beside the store."""
        return [path for path in self.files if "." in path and not path.startswith(LEFT_BESIDE)]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks in the manifest."""
        found: list[dict[str, Any]] = self.manifest["chunks"]
        return found

    def folder_of(self, chunk: int) -> dict[str, bytes]:
        """The files of a chunk."""
        return {name: self.files[f"{store_format.chunk_name(chunk)}/{name}"] for name in CHUNK_FILES}

    def set_folder(self, chunk: int, files: dict[str, bytes]) -> None:
        """Put files into the folder of a chunk."""
        for name, data in files.items():
            self.files[f"{store_format.chunk_name(chunk)}/{name}"] = data

    def described(self, path: str) -> dict[str, Any]:
        """What the manifest says of a file: its size and checksum, as an entry that can be changed."""
        folder, _, name = path.rpartition("/")
        if folder.startswith("chunk-"):
            found: dict[str, Any] = self.chunks[int(folder.removeprefix("chunk-"))]["files"][name]
        elif folder.startswith("totals-"):
            found = self.manifest["totals"]["files"][name]
        else:
            step = int(name.removeprefix("snapshot-").removesuffix(".safetensors"))
            found = next(one["file"] for one in self.manifest["snapshots"] if one["step"] == step)
        return found

    def replace_file(self, path: str, data: bytes) -> None:
        """Another content of a file that the manifest names, with size and checksum corrected."""
        described = self.described(path)
        self.files[path] = data
        described["size"] = len(data)
        described["checksum"] = checksum(_header(data) if path.endswith(".safetensors") else data)


def _header(data: bytes) -> bytes:
    return data[: 8 + int.from_bytes(data[:8], "little")]


@dataclass
class Tensors:
    """A safetensors file, taken apart."""

    metadata: dict[str, str]
    arrays: dict[str, tuple[str, list[int], bytes]]
    """By name: type, shape and bytes."""

    @staticmethod
    def parse(data: bytes) -> Tensors:
        """Take a file apart."""
        head = _header(data)
        described = json.loads(head[8:])
        metadata = described.pop("__metadata__", {})
        arrays = {
            name: (
                one["dtype"],
                one["shape"],
                data[len(head) + one["data_offsets"][0] : len(head) + one["data_offsets"][1]],
            )
            for name, one in described.items()
        }
        return Tensors(metadata, arrays)

    def dump(self) -> bytes:
        """Put it together again, with the checksums of the tensors corrected."""
        header: dict[str, Any] = {"__metadata__": {**self.metadata}}
        at = 0
        for name, (dtype, shape, data) in self.arrays.items():
            header["__metadata__"][name] = checksum(data)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in self.arrays.values())


Mutation = Callable[[Forgery, Forgery, random.Random], str]
"""Changes a store in place; gets another run of the same kind too. Says what it did."""


def edit_count(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """Another number somewhere in the manifest."""
    places = list(_numbers(store.manifest))
    place = draw.choice(places)
    target: Any = store.manifest
    for key in place[:-1]:
        target = target[key]
    old = target[place[-1]]
    new = draw.choice([old + 1, max(0, old - 1), 0, 1, old * 2, old + draw.randint(1, 100), 2**31, 2**53, 2**63])
    target[place[-1]] = new
    return f"{'.'.join(map(str, place))} is {new} instead of {old}"


def _numbers(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all counts: whole numbers, but for sizes of files, which are corrected, and the version."""
    if isinstance(value, bool) or place in (("version",),) or (place and place[-1] == "size"):
        return []
    if isinstance(value, int):
        return [place]
    if isinstance(value, dict) and place not in (("inexact",), ("rows",), ("batch_axis",), ("settings",)):
        return [found for key, inner in value.items() for found in _numbers(inner, (*place, key))]
    if isinstance(value, list):
        return [found for key, inner in enumerate(value) for found in _numbers(inner, (*place, key))]
    return []


def edit_two_counts(store: Forgery, other: Forgery, draw: random.Random) -> str:
    """Two numbers, which may fit together."""
    return f"{edit_count(store, other, draw)}, {edit_count(store, other, draw)}"


def duplicate_chunk(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """A chunk is there twice, with its files."""
    which = draw.randrange(len(store.chunks))
    where = draw.randint(0, len(store.chunks))
    folders = [store.folder_of(n) for n in range(len(store.chunks))]
    folders.insert(where, folders[which])
    store.chunks.insert(where, copy.deepcopy(store.chunks[which]))
    return f"chunk {which} again at {where}{_settle(store, folders, draw)}"


def drop_chunk(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """A chunk is missing; not the last one, without which a recording is a shorter one."""
    which = draw.randrange(len(store.chunks) - 1)
    folders = [store.folder_of(n) for n in range(len(store.chunks))]
    del folders[which], store.chunks[which]
    return f"without chunk {which}{_settle(store, folders, draw)}"


def drop_last_chunk(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """The last chunk is missing in a recording that says it has ended, with snapshots and totals of later steps."""
    store.chunks.pop()
    return "without the last chunk"


def reorder_chunks(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """Two chunks have changed places: in the manifest, as folders, or both."""
    one, two = draw.sample(range(len(store.chunks)), 2)
    folders = [store.folder_of(n) for n in range(len(store.chunks))]
    how = draw.choice(["entries", "folders", "both"])
    if how != "folders":
        store.chunks[one], store.chunks[two] = store.chunks[two], store.chunks[one]
    if how != "entries":
        folders[one], folders[two] = folders[two], folders[one]
    return f"chunks {one} and {two} exchanged ({how}){_settle(store, folders, draw)}"


def foreign_chunk(store: Forgery, other: Forgery, draw: random.Random) -> str:
    """A chunk of another run, with its entry in the manifest, or with the counts of the one it replaces."""
    which = draw.randrange(min(len(store.chunks), len(other.chunks)))
    source = draw.randrange(len(other.chunks))
    entry = copy.deepcopy(other.chunks[source])
    keeps_counts = draw.random() < 0.5
    if keeps_counts:
        entry = {**copy.deepcopy(store.chunks[which]), "files": entry["files"]}
    store.chunks[which] = entry
    store.set_folder(which, other.folder_of(source))
    return f"chunk {which} is chunk {source} of another run{' with the counts of its own' if keeps_counts else ''}"


def exchange_files(store: Forgery, other: Forgery, draw: random.Random) -> str:
    """A file is that of another chunk, snapshot or run, of the same name."""
    path = draw.choice(store.described_files)
    folder, _, name = path.rpartition("/")
    source = draw.choice([store, other])
    kind = name.split("-")[0]
    candidates = [p for p in source.files if p.rpartition("/")[2].split("-")[0] == kind]
    if folder.startswith("totals-") and not other.manifest.get("totals"):
        candidates = [path]
    chosen = draw.choice(candidates)
    try:
        store.replace_file(path, source.files[chosen])
    except KeyError:
        return "nothing"
    described = store.described(path)
    described.update({k: v for k, v in source.described(chosen).items() if k not in ("size", "checksum")})
    return f"{path} is {chosen}{'' if source is store else ' of another run'}"


def edit_snapshots(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """The first snapshot is missing, or one is said to be of another step. Without one of the others, a recording is still true."""
    snapshots = store.manifest["snapshots"]
    if draw.random() < 0.3:
        del snapshots[0]
        return "without the first snapshot"
    which = draw.randrange(len(snapshots))
    step = snapshots[which]["step"]
    new = draw.choice([step + 1, max(0, step - 1), 10**6])
    snapshots[which]["step"] = new
    store.files[store_format.snapshot_name(new)] = store.files[store_format.snapshot_name(step)]
    return f"the snapshot of step {step} is said to be of step {new}"


def edit_totals(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """Totals of other columns, of another kind, or without a file."""
    totals = store.manifest.get("totals")
    if not totals:
        return "nothing"
    how = draw.choice(["columns", "kind", "file", "groups"])
    grouping = draw.choice(totals["groupings"])
    if how == "columns":
        grouping["columns"] = draw.choice([["sample_id"], ["half"], [], ["label", "sample_id"], ["there is none"]])
    elif how == "kind":
        grouping["kind"] = draw.choice(["keys", "deltas", "none"])
    elif how == "file":
        del totals["files"][draw.choice(list(totals["files"]))]
    else:
        totals["groupings"].append(copy.deepcopy(grouping))
    return f"totals with other {how}"


def edit_blocks(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """Another number of rows or positions in the table that says which slots are whose, with all checksums corrected."""
    return _edit_tensor(store, draw, "blocks", _changed_count)


def edit_key_numbers(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """A slot names a key that is not there."""
    return _edit_tensor(store, draw, "key_numbers", _changed_key)


def shorten_tensor(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """A tensor has a line less, or one twice."""
    return _edit_tensor(store, draw, "", _changed_length)


def drop_tensor(store: Forgery, _: Forgery, draw: random.Random) -> str:
    """A tensor is missing."""
    path, tensors = _drawn_tensors(store, draw)
    name = draw.choice(list(tensors.arrays))
    del tensors.arrays[name]
    tensors.metadata.pop(name, None)
    store.replace_file(path, tensors.dump())
    return f"{path} without {name}"


def _drawn_tensors(store: Forgery, draw: random.Random, ending: str = ".safetensors") -> tuple[str, Tensors]:
    path = draw.choice([path for path in store.described_files if path.endswith(ending)])
    return path, Tensors.parse(store.files[path])


def _edit_tensor(
    store: Forgery,
    draw: random.Random,
    ending: str,
    change: Callable[[np.ndarray[Any, Any], random.Random], Any],
) -> str:
    path, tensors = _drawn_tensors(store, draw, SLOTS if ending else ".safetensors")
    names = [name for name, (_, shape, _) in tensors.arrays.items() if name.endswith(ending) and shape and shape[0]]
    if not names:
        return "nothing"
    name = draw.choice(names)
    dtype, shape, data = tensors.arrays[name]
    numpy_type = {"I64": np.int64, "F32": np.float32, "F64": np.float64, "F16": np.float16}.get(dtype, np.uint8)
    if np.dtype(numpy_type).itemsize * int(np.prod(shape)) != len(data):
        return "nothing"
    array = change(np.frombuffer(data, numpy_type).reshape(shape).copy(), draw)
    tensors.arrays[name] = (dtype, list(array.shape), array.tobytes())
    store.replace_file(path, tensors.dump())
    return f"{name} of {path} changed"


def _changed_count(array: np.ndarray[Any, Any], draw: random.Random) -> np.ndarray[Any, Any]:
    line, column = draw.randrange(len(array)), draw.choice([4, 5])
    old = int(array[line, column])
    array[line, column] = draw.choice([old + 1, old - 1, old + 1000, 2**40, -1])
    return array


def _changed_key(array: np.ndarray[Any, Any], draw: random.Random) -> np.ndarray[Any, Any]:
    array[draw.randrange(len(array))] = draw.choice([-1, 10**6, 2**40, -(2**40)])
    return array


def _changed_length(array: np.ndarray[Any, Any], draw: random.Random) -> np.ndarray[Any, Any]:
    which = draw.randrange(len(array))
    if draw.random() < 0.5:
        return np.delete(array, which, axis=0)
    return np.insert(array, which, array[which], axis=0)


def _settle(store: Forgery, folders: list[dict[str, bytes]], draw: random.Random) -> str:
    """Write the folders of chunks anew; with luck, steps and rows follow each other again."""
    for path in [path for path in store.files if path.startswith("chunk-")]:
        del store.files[path]
    for number, files in enumerate(folders):
        store.set_folder(number, files)
    if draw.random() < 0.5:
        return ""
    step = row = 0
    for chunk in store.chunks:
        steps = chunk["end_step"] - chunk["first_step"]
        chunk.update(first_step=step, end_step=step + steps, first_row=row)
        step, row = step + steps, row + chunk["rows"]
    if "steps" in store.manifest:
        store.manifest["steps"] = step
    return ", counted anew"


OF_CHUNKS: tuple[Mutation, ...] = (
    duplicate_chunk,
    drop_chunk,
    drop_last_chunk,
    reorder_chunks,
    foreign_chunk,
    edit_blocks,
    edit_key_numbers,
)
OF_ALL: tuple[Mutation, ...] = (
    edit_count,
    edit_count,
    edit_two_counts,
    exchange_files,
    edit_snapshots,
    edit_totals,
    shorten_tensor,
    drop_tensor,
)


@dataclass
class Target:
    """A store and another run of the same kind."""

    kind: Kind
    store: Forgery
    other: Forgery
    expected: list[str]


class Campaign(Base):
    """Structured mutations, in batches."""

    name = "structured"
    unit = "structured mutations"
    goal = 20_000

    def __init__(self, folder: Path):
        self._folder = folder / "changed"
        self._targets = []
        for name in KINDS_USED:
            kind = KINDS[name]
            expected = forks.call(partial(make, folder / "one", kind, 0))
            forks.call(partial(make, folder / "other", kind, 1))
            store, other = Forgery.load(folder / "one"), Forgery.load(folder / "other")
            store.write(self._folder)
            if forks.call(partial(answers, self._folder, kind)) != expected:
                raise AssertionError(f"{name}: a store that was written again gives other answers")
            self._targets.append(Target(kind, store, other, expected))
            shutil.rmtree(folder / "one")
            shutil.rmtree(folder / "other")

        self._of_tests = folder / "of-tests"
        self._expected_of_tests = forks.call(partial(_make_for_tests, self._of_tests))

    def run(self, draw: random.Random, number: int) -> Outcome:
        """One batch, of the mutations in this file or of those that the test suite tries one by one."""
        target = draw.choice(self._targets)
        work = partial(_batch, target, self._folder, draw)
        if draw.random() < 0.3:
            work = partial(_batch_of_tests, self._of_tests, self._expected_of_tests, self._folder, draw)
        try:
            return forks.call(work, seconds=600)
        except forks.ChildError as error:
            outcome = Outcome()
            outcome.fail(f"{target.kind.name}: {error}", self._folder)
            return outcome


def make(folder: Path, kind: Kind, seed: int) -> list[str]:
    """A store with a few chunks, several snapshots and totals; gives its answers."""
    training = Training(kind, seed)
    settings = {"chunk_bytes": 4000} if kind.keeps_slots else {}
    with training.record(folder, **settings) as recorder:
        training.go_on(recorder)
    if kind.keeps_slots and not kind.has_totals:
        dualform.build_totals(folder, "label")
    return answers(folder, kind)


def _batch(target: Target, folder: Path, draw: random.Random) -> Outcome:
    outcome = Outcome()
    limit_memory()
    mutations = (*OF_CHUNKS, *OF_ALL) if target.kind.keeps_slots else OF_ALL
    for _ in range(BATCH):
        mutation = draw.choice(mutations)
        forgery = target.store.copy()
        what = mutation(forgery, target.other, draw)
        if forgery == target.store:
            continue
        forgery.write(folder)
        name = mutation.__name__.replace("_", " ")
        try:
            result = guarded(partial(_judge, target, folder))
        except Exception as error:
            outcome.fail(f"{target.kind.name}, {name}: {what}: {type(error).__name__}: {error}", folder)
            result = "failed"
        outcome.counts["structured mutations"] += 1
        outcome.counts[f"{name}: {result}"] += 1
    return outcome


def _judge(target: Target, folder: Path) -> str:
    try:
        found = answers(folder, target.kind)
    except DualformError as error:  # the first question may find something else wrong: a model of other shapes, say
        return type(error).__name__
    if found != target.expected:
        verdict = "passes" if dualform.open(folder).verify().passed else "fails"
        raise AssertionError(f"other answers, and verify {verdict}")
    return "same answers"


def _make_for_tests(folder: Path) -> list[str]:
    """A run that was resumed, the same run before that, and another run; gives the answers of the first."""
    inconsistent.record(folder / "original")
    shutil.copytree(folder / "original", folder / "earlier")
    inconsistent.record(folder / "original", resume=4)
    inconsistent.record(folder / "foreign", seed=1)
    found: list[str] = inconsistent.answers(folder / "original")
    return found


def _batch_of_tests(stores: Path, expected: list[str], folder: Path, draw: random.Random) -> Outcome:
    """One or two mutations of tests/store/inconsistent.py at a time."""
    outcome = Outcome()
    limit_memory()
    every = list(inconsistent.mutations(stores / "original", stores / "foreign", stores / "earlier"))
    for _ in range(BATCH):
        chosen = draw.sample(every, draw.randint(1, 2))
        name = " and ".join(mutation.name for mutation in chosen)
        shutil.rmtree(folder, ignore_errors=True)
        inconsistent.linked_copy(stores / "original", folder)
        try:
            for mutation in chosen:
                mutation.apply(folder)
        except (KeyError, IndexError, TypeError, ValueError, FileNotFoundError):
            continue  # the second does not fit what the first has left
        try:
            result = guarded(partial(inconsistent.outcome, folder, expected))
            if not result.startswith(("refused", "same")):
                raise AssertionError(result)
            result = result.split(":")[1].strip() if result.startswith("refused") else "same answers"
        except Exception as error:
            outcome.fail(f"of the tests, {name}: {type(error).__name__}: {error}", folder)
            result = "failed"
        outcome.counts["structured mutations"] += 1
        outcome.counts[f"of tests/store/inconsistent.py: {result}"] += 1
    return outcome
