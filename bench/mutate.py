"""Damage every region of every file of a small store, and ask it everything.

    python bench/mutate.py [10000]

Each damage (a flipped bit, a run of zeros, a cut, a swap with another file, a huge header length) must be refused with an
error of ours, or be harmless: all answers as before. A crash, a hang, a large allocation or another answer fails.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import DualformError

SECONDS, ALLOCATION = 20, 2 << 30


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def make(folder: Path, dtype: str) -> None:
    """A store with everything in it: several chunks, equal keys, positions, snapshots, totals."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    with dualform.record(model, optimizer, folder, dtype=dtype, chunk_bytes=2500, totals=["label"]) as recorder:
        for step in range(8):
            ids = torch.randint(0, 8, (4,))
            recorder.batch(sample_id=ids, label=y[ids], name=[f"é{i}" for i in ids.tolist()])
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            recorder.log(loss=step)
            if step == 3:
                recorder.seal()


def answers(folder: Path) -> list[str]:
    """Everything a store can be asked, as text that can be compared."""
    model = network()
    dual = dualform.open(folder, model)
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    attention, contributions = dual.attend(x), dual.contributions(x)
    found = [str(dual.info()), dual.rows.write_json(), dual.log.write_json(), dual.verify().to_json()]
    for layer in dual.layers:
        found.append(attention[layer].top(50).write_json())
        found.append(attention[layer].total("label").write_json())
        found.append(attention[layer].total("name", absolute=True).write_json())
        found.append(contributions[layer].top(3, where="label = 1", lowest=True).write_json())
        found.append(contributions[layer].parts().write_json())
    others = (
        dual.masked(drop="label = 1"),
        dual.masked(keep="sample_id < 4", read="kept"),
        dual.at_step(5),
        dual.at_step(2),
    )
    return [*found, *(str([p.tolist() for p in other.parameters()]) for other in others)]


def damage(data: bytes, kind: str, other: bytes) -> bytes:
    place = random.randrange(len(data)) if data else 0
    if kind == "bit":
        return data[:place] + bytes([data[place] ^ (1 << random.randrange(8))]) + data[place + 1 :]
    if kind == "zeros":
        return data[:place] + bytes(min(16, len(data) - place)) + data[place + 16 :]
    if kind == "cut":
        return data[:place]
    if kind == "grown":
        return data + bytes(8)
    if kind == "header":
        return random.choice([b"\xff" * 8, (len(data) * 1000).to_bytes(8, "little"), bytes(8)]) + data[8:]
    return other  # swapped


KINDS = {"bit": 0.8, "zeros": 0.06, "cut": 0.05, "grown": 0.02, "header": 0.02, "swapped": 0.05}


def outcome(folder: Path, expected: list[str]) -> str:
    """What the store says for itself."""
    try:
        found = answers(folder)
    except DualformError as error:
        return f"refused: {type(error).__name__}"
    return "harmless" if found == expected else "WRONG"


def guarded(ask: Callable[[], str]) -> str:
    signal.alarm(SECONDS)
    try:
        return ask()
    except MemoryError:
        return "LARGE ALLOCATION"
    except Exception as error:
        return f"CRASH {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def hang(*_: object) -> None:
    raise TimeoutError("a hang")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    random.seed(1)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, hang)
    outcomes: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = {dtype: Path(temporary) / dtype for dtype in ("float32", "float16")}
        for dtype, folder in folders.items():
            make(folder, dtype)
        expected = {dtype: answers(folder) for dtype, folder in folders.items()}
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ALLOCATION, resource.RLIM_INFINITY))
        for number in range(count):
            dtype = random.choice(list(folders))
            files = sorted(p for p in folders[dtype].rglob("*") if p.is_file() and p.stat().st_size)
            path = files[number % len(files)]
            kind = random.choices(list(KINDS), list(KINDS.values()))[0]
            original = path.read_bytes()
            mutated = damage(original, kind, random.choice(files).read_bytes())
            if mutated == original:
                continue
            path.write_bytes(mutated)
            result = guarded(lambda dtype=dtype: outcome(folders[dtype], expected[dtype]))  # type: ignore[misc]
            path.write_bytes(original)
            outcomes[result.split(":")[0] if result[0].isupper() else result] += 1
            covered[path.suffix + " " + path.name.split("-")[0]] += 1
            if result[0].isupper():
                bad.append(f"{path.relative_to(folders[dtype])} {kind}: {result}")
                shutil.copy(path, temporary)
    print(f"{count} mutations over {dict(covered)}")
    for name, times in outcomes.most_common():
        print(f"  {times:6} {name}")
    for line in bad[:20]:
        print(line)
    if bad:
        sys.exit(f"{len(bad)} damages were neither refused nor harmless")
