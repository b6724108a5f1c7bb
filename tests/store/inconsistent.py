"""Stores that are well-formed but inconsistent: parts duplicated, dropped, swapped or taken from another run, and edited counts.

Checksums and sizes are always corrected, as by somebody who moved files around and repaired the manifest. Each such store must be
refused with a store error, or answer as the original does: `outcome` says which.

    for mutation in mutations(original, foreign):
        copy = linked_copy(original, folder)
        mutation.apply(copy)
        assert outcome(copy, expected).startswith(("refused", "same"))
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import StoreError
from dualform.store.format import MANIFEST, SLOTS, checksum, chunk_name, snapshot_name, totals_name
from dualform.store.parquet import describe

Data = dict[str, Any]
Change = Callable[[Data], None]


@dataclass(frozen=True)
class Mutation:
    """One way to make a store inconsistent."""

    name: str
    apply: Callable[[Path], None]
    """Changes the store in a folder."""


# A store with everything in it, and what it can be asked


class Network(nn.Module):
    """Keys of all forms: vectors that repeat, numbers, feature maps, and vectors that do not repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.table = nn.Embedding(8, 4)
        self.conv = nn.Conv1d(2, 3, 2)
        self.head = nn.Linear(3, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hot = F.one_hot(numbers, 8).to(self.head.weight.dtype)
        maps = (self.first(hot) + self.table(numbers)).reshape(len(numbers), 2, 2)
        return self.head(torch.tanh(self.conv(maps)).flatten(1))


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network()


def record(
    folder: Path, *, seed: int = 0, steps: int = 8, resume: int | None = None, rows: int = 4, **settings: Any
) -> nn.Module:
    """Record a short training: several chunks, a snapshot on the way, totals. resume: go on from this step, with other data."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.arange(8)
    generator = torch.Generator().manual_seed(seed + (0 if resume is None else 1000))
    if resume is not None:
        snapshot = dualform.open(folder).store.snapshot(resume)
        model.load_state_dict({n.removeprefix("model."): snapshot[n] for n in snapshot if n.startswith("model.")})
        for name, parameter in model.named_parameters():
            optimizer.state[parameter]["momentum_buffer"] = snapshot[f"state.{name}.momentum_buffer"].clone()
    begun = 0 if resume is None else resume
    with dualform.record(model, optimizer, folder, resume=False if resume is None else resume, **settings) as recorder:
        for step in range(begun, steps):
            ids = torch.randint(0, 8, (rows,), generator=generator)
            recorder.batch(sample_id=ids, label=ids % 3, name=[f"é{i}" for i in ids.tolist()])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), ids % 3).backward()
            optimizer.step()
            recorder.log(loss=step)
            if step % 2:  # chunks of two steps, each with a snapshot at its end
                recorder.seal()
    dualform.build_totals(folder, "label")
    return model


def answers(folder: Path) -> list[str]:
    """What a store says to questions of every kind, as texts that can be compared."""
    dual = dualform.open(folder, network())
    numbers = torch.tensor([1, 6])
    info = {name: value for name, value in dual.info().items() if name != "path"}
    found = [str(info), dual.rows.write_json(), dual.log.write_json(), dual.verify().to_json()]
    attention = dual.attend(numbers)
    contributions = dual.contributions(numbers)
    for layer in dual.layers:
        found.append(attention[layer].top(50).write_json())
        found.append(attention[layer].total("label").write_json())
        found.append(contributions[layer].top(3, where="label = 1", lowest=True).write_json())
        found.append(contributions[layer].parts().write_json())
    masked = dual.masked(drop="sample_id = 1", read="kept")
    earlier = dual.at(2).model()
    weights = [parameter.tolist() for model in (masked, earlier) for parameter in model.parameters()]
    return [*found, str(weights)]


def outcome(folder: Path, expected: list[str]) -> str:
    """ "refused: …", "same", or "OTHER ANSWERS"; what is no store error is raised."""
    try:
        found = answers(folder)
    except StoreError as error:
        return f"refused: {type(error).__name__}: {error}"
    if found == expected:
        return "same"
    places = [place for place, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    return f"OTHER ANSWERS to questions {places}"


# Editing


def linked_copy(original: Path, copy: Path) -> Path:
    """A copy of a store whose files are hard links. Files are never written in place here, so the original stays as it is."""
    shutil.copytree(original, copy, copy_function=os.link)
    return copy


def write_anew(path: Path, content: bytes) -> None:
    """Write a file of its own, in the place of what may be a link."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def edit(folder: Path, change: Change) -> None:
    """Change the manifest's content and correct its checksum."""
    path = folder / MANIFEST
    data = json.loads(path.read_text())
    change(data)
    write_manifest(folder, data)


def write_manifest(folder: Path, data: Data) -> None:
    """Write a manifest with the checksum that fits it."""
    data.pop("checksum", None)
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    write_anew(folder / MANIFEST, json.dumps({**data, "checksum": checksum(canonical)}).encode())


def settle(data: Data) -> None:
    """Let steps and rows of the chunks follow each other again, as somebody would who is careful."""
    step = row = 0
    for chunk in data["chunks"]:
        length = chunk["end_step"] - chunk["first_step"]
        chunk["first_step"], chunk["first_row"] = step, row
        chunk["end_step"] = step = step + length
        row += chunk["rows"]
    data["steps"] = step
    data["snapshots"] = [snapshot for snapshot in data["snapshots"] if snapshot["step"] <= step]
    if data["totals"] is not None and data["totals"]["step"] > step:
        data["totals"] = None


def refer(folder: Path, data: Data) -> None:
    """Let the manifest name the files as they are now: sizes, checksums and lines."""
    for number, chunk in enumerate(data["chunks"]):
        for name in chunk["files"]:
            chunk["files"][name] = file_entry(folder / chunk_name(number) / name)
    for snapshot in data["snapshots"]:
        snapshot["file"] = file_entry(folder / snapshot_name(snapshot["step"]))
    if data["totals"] is not None:
        for name in data["totals"]["files"]:
            data["totals"]["files"][name] = file_entry(folder / totals_name(data["totals"]["number"]) / name)


def file_entry(path: Path) -> Data:
    """How a manifest describes a file."""
    content = path.read_bytes()
    if path.suffix == ".parquet":
        return {"size": len(content), "checksum": checksum(content), "lines": describe(content).lines}
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    return {"size": len(content), "checksum": checksum(header), "lines": None}


def numbers_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers in JSON content."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from numbers_in(value, (*path, name))
    elif isinstance(data, list):
        for place, value in enumerate(data):
            yield from numbers_in(value, (*path, place))
    elif isinstance(data, int) and not isinstance(data, bool):
        yield path


def value_at(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


def set_at(data: Any, path: tuple[Any, ...], value: Any) -> None:
    value_at(data, path[:-1])[path[-1]] = value


# Mutations


def mutations(original: Path, foreign: Path, earlier: Path | None = None) -> Iterator[Mutation]:
    """All of them. foreign: another run of the same network, with chunks of the same sizes. earlier: the same run before it was resumed."""
    data = json.loads((original / MANIFEST).read_text())
    yield from count_mutations(data)
    yield from chunk_mutations(len(data["chunks"]), foreign)
    yield from file_mutations(data, foreign)
    yield from snapshot_mutations([snapshot["step"] for snapshot in data["snapshots"]], foreign)
    yield from totals_mutations(data, foreign)
    yield from run_mutations(foreign)
    if earlier is not None:
        yield from session_mutations(original, earlier)


def count_mutations(data: Data) -> Iterator[Mutation]:
    """Each count one more and one less; those of chunks also with everything after it moved accordingly."""
    parts = ("steps", "sessions", "chunks", "snapshots", "totals", "layers", "parameters")
    for path in numbers_in({part: data[part] for part in parts}):
        for added in (1, -1):
            name = f"{'.'.join(map(str, path))} {added:+}"
            yield Mutation(name, lambda folder, path=path, added=added: edit(folder, _add(path, added)))
            if path[0] == "chunks":
                yield Mutation(
                    f"{name}, settled", lambda folder, path=path, added=added: edit(folder, _add(path, added, settle))
                )


def _add(path: tuple[Any, ...], added: int, then: Change = lambda data: None) -> Change:
    def change(data: Data) -> None:
        set_at(data, path, value_at(data, path) + added)
        then(data)

    return change


def chunk_mutations(count: int, foreign: Path) -> Iterator[Mutation]:
    """Chunks that are dropped, duplicated, in another order, or another run's."""
    orders = {f"drop chunk {n}": [m for m in range(count) if m != n] for n in range(count)}
    orders |= {f"duplicate chunk {n}": sorted([*range(count), n]) for n in range(count)}
    orders |= {f"repeat chunk {n} at the end": [*range(count), n] for n in range(count)}
    for one in range(count):
        for other in range(one + 1, count):
            swapped = list(range(count))
            swapped[one], swapped[other] = other, one
            orders[f"swap chunks {one} and {other}"] = swapped
    orders["reverse chunks"] = list(range(count))[::-1]
    for name, order in orders.items():
        yield Mutation(name, lambda folder, order=order: _reorder(folder, order, lambda data: None))
        if order != list(
            range(count - 1)
        ):  # without its last chunk, a settled store is that of an earlier moment, and right
            yield Mutation(f"{name}, settled", lambda folder, order=order: _reorder(folder, order, settle))
    for number in range(count):
        yield Mutation(f"foreign chunk {number}", lambda folder, n=number: _take_chunk(folder, foreign, n, n))
        other = (number + 1) % count
        yield Mutation(
            f"foreign chunk {other} as {number}", lambda folder, n=number, m=other: _take_chunk(folder, foreign, m, n)
        )


def _reorder(folder: Path, order: list[int], then: Change) -> None:
    """Let the chunks be these, by their former numbers."""
    kept = folder / "kept"
    kept.mkdir()
    for path in list(folder.glob("chunk-*")):
        path.rename(kept / path.name)
    for number, former in enumerate(order):
        shutil.copytree(kept / chunk_name(former), folder / chunk_name(number))
    shutil.rmtree(kept)

    def change(data: Data) -> None:
        data["chunks"] = [json.loads(json.dumps(data["chunks"][former])) for former in order]
        then(data)

    edit(folder, change)


def _take_chunk(folder: Path, foreign: Path, theirs: int, ours: int) -> None:
    shutil.rmtree(folder / chunk_name(ours))
    shutil.copytree(foreign / chunk_name(theirs), folder / chunk_name(ours))
    entry = json.loads((foreign / MANIFEST).read_text())["chunks"][theirs]

    def change(data: Data) -> None:
        data["chunks"][ours] = entry
        settle(data)

    edit(folder, change)


def file_mutations(data: Data, foreign: Path) -> Iterator[Mutation]:
    """Single files of a chunk from another chunk, or from the same chunk of another run."""
    count = len(data["chunks"])
    for number in range(count):
        for name in data["chunks"][number]["files"]:
            other = f"{chunk_name((number + 1) % count)}/{name}"
            target = f"{chunk_name(number)}/{name}"
            yield Mutation(f"{other} as {target}", lambda folder, o=other, t=target: _replace(folder, folder / o, t))
            yield Mutation(f"foreign {target}", lambda folder, t=target: _replace(folder, foreign / t, t))
    for name in data["chunks"][0]["files"]:
        if name != SLOTS:
            yield Mutation(
                f"rows as {name}",
                lambda folder, n=name: _replace(
                    folder, folder / chunk_name(0) / "rows.parquet", f"{chunk_name(0)}/{n}"
                ),
            )


def _replace(folder: Path, source: Path, target: str) -> None:
    """Put a file in the place of another, and correct what the manifest says of it."""
    content = source.read_bytes()
    write_anew(folder / target, content)
    edit(folder, lambda data: refer(folder, data))


def snapshot_mutations(steps: list[int], foreign: Path) -> Iterator[Mutation]:
    """Snapshots in each other's place, of another step, or another run's."""
    for step in steps:
        name = snapshot_name(step)
        yield Mutation(f"foreign {name}", lambda folder, n=name: _replace(folder, foreign / n, n))
        others = [other for other in steps if other != step]
        for other in others:
            source = snapshot_name(other)
            yield Mutation(f"{source} as {name}", lambda folder, s=source, n=name: _replace(folder, folder / s, n))
        if step + 1 not in steps:
            yield Mutation(f"{name} renamed", lambda folder, step=step: _rename_snapshot(folder, step, step + 1))
    yield Mutation("no snapshot", lambda folder: edit(folder, lambda data: data["snapshots"].clear()))
    yield Mutation("the first snapshot is missing", lambda folder: edit(folder, lambda data: data["snapshots"].pop(0)))
    yield Mutation(
        "a snapshot twice", lambda folder: edit(folder, lambda data: data["snapshots"].append(data["snapshots"][0]))
    )


def _rename_snapshot(folder: Path, step: int, to: int) -> None:
    (folder / snapshot_name(step)).rename(folder / snapshot_name(to))

    def change(data: Data) -> None:
        for snapshot in data["snapshots"]:
            if snapshot["step"] == step:
                snapshot["step"] = to

    edit(folder, change)


def totals_mutations(data: Data, foreign: Path) -> Iterator[Mutation]:
    """Totals of another run, or under another number, or of other columns."""
    if data["totals"] is None:
        return
    number = data["totals"]["number"]
    own = totals_name(number)
    theirs = json.loads((foreign / MANIFEST).read_text())["totals"]
    for name in data["totals"]["files"]:
        source = foreign / totals_name(theirs["number"]) / name
        yield Mutation(f"foreign {own}/{name}", lambda folder, s=source, n=name: _replace(folder, s, f"{own}/{n}"))

    def move(folder: Path) -> None:
        (folder / own).rename(folder / totals_name(number + 7))
        edit(folder, lambda data: data["totals"].update(number=number + 7))

    yield Mutation("totals renamed", move)
    for kind in ("keys", "deltas"):
        yield Mutation(
            f"totals of {kind}",
            lambda folder, kind=kind: edit(folder, lambda data: data["totals"]["groupings"][0].update(kind=kind)),
        )
    yield Mutation(
        "totals by another column",
        lambda folder: edit(folder, lambda data: data["totals"]["groupings"][0].update(columns=["sample_id"])),
    )


def run_mutations(foreign: Path) -> Iterator[Mutation]:
    """The manifest of another run, or its identity."""
    theirs = json.loads((foreign / MANIFEST).read_text())
    yield Mutation("another run's name", lambda folder: edit(folder, lambda data: data.update(run=theirs["run"])))
    yield Mutation(
        "another run's sessions", lambda folder: edit(folder, lambda data: data.update(sessions=theirs["sessions"]))
    )
    yield Mutation(
        "another run's layers", lambda folder: edit(folder, lambda data: data.update(layers=data["layers"][::-1]))
    )
    for field, value in (("keep", "keys"), ("dtype", "float64"), ("dtype", "float16")):
        yield Mutation(
            f"{field} = {value}", lambda folder, f=field, v=value: edit(folder, lambda data: data.update({f: v}))
        )


def session_mutations(original: Path, earlier: Path) -> Iterator[Mutation]:
    """Files that were dropped when the run was resumed, in the place of those that replaced them."""
    names = sorted(str(path.relative_to(original)) for path in original.rglob("*") if path.suffix != ".lock")
    for name in names:
        here, before = original / name, earlier / name
        if here.is_file() and before.is_file() and name != MANIFEST and here.read_bytes() != before.read_bytes():
            yield Mutation(f"dropped {name}", lambda folder, s=before, n=name: _replace(folder, s, n))
    chunks = json.loads((earlier / MANIFEST).read_text())["chunks"]
    for number in range(len(chunks)):
        if (original / chunk_name(number)).is_dir():
            content = [(root / chunk_name(number) / SLOTS).read_bytes() for root in (original, earlier)]
            if content[0] != content[1]:
                yield Mutation(f"dropped chunk {number}", lambda folder, n=number: _take_chunk(folder, earlier, n, n))
