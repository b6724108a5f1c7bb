"""Many threads ask one recording, and one answer, at the same time; everybody gets what a single thread gets."""

import random
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.layers.keys import Vectors
from dualform.query import scan
from dualform.query.search import index
from dualform.store import cache_files
from dualform.store.tensors import write_tensors

SAMPLES, FEATURES, CLASSES, ROWS, STEPS, THREADS = 48, 24, 5, 16, 20, 3
INPUTS = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(SAMPLES) % CLASSES
QUERIES = torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(2))
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
}


def train(path, optimizer, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    made = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, made, path, dtype=dtype, chunk_bytes=6000, totals=["label"]) as recorder:
        for step in range(STEPS):
            ids = torch.randint(0, SAMPLES, (ROWS,))
            recorder.batch(sample_id=ids, label=LABELS[ids], task=step % 3)
            made.zero_grad()
            F.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
            made.step()
            if step == STEPS // 2:
                recorder.seal()
    return model


@pytest.fixture(scope="module", params=[("sgd", "float16"), ("adam", "float32")], ids="-".join)
def recorded(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("threads") / "run"
    return path, train(path, *request.param)


@pytest.fixture(autouse=True, scope="module")
def one_thread_in_each_product():
    """Products on several threads round differently, and a thread that Python starts has PyTorch's default number of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pool_of(count):
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=["as it is", "in small blocks"])
def sizes(request, monkeypatch):
    """In small blocks: few queries, slots and rows are looked at at a time, so that every cache is used and replaced often."""
    if request.param == "in small blocks":
        monkeypatch.setattr(scan, "BLOCK_BYTES", 1 << 14)
        monkeypatch.setattr(index, "FEWEST_SLOTS", 1)


def plain(answer):
    """Something that can be compared with ==."""
    if isinstance(answer, torch.Tensor):
        return answer.detach().tolist()
    if isinstance(answer, pl.DataFrame):
        return answer.to_dict(as_series=False)
    if isinstance(answer, nn.Module):
        return [p.detach().tolist() for p in answer.parameters()]
    if isinstance(answer, dict):
        return {name: plain(one) for name, one in answer.items()}
    if isinstance(answer, (tuple, list)):
        return [plain(one) for one in answer]
    return answer


class Answers:
    """A dual and its answers, which all threads share."""

    def __init__(self, path, model):
        self.dual = dualform.open(path, model)
        self.attention = self.dual.attend(QUERIES)
        self.contributions = self.dual.contributions(QUERIES, target=1)
        self.influence = self.dual.influence(QUERIES, target=1, segments=[(0, STEPS)])
        self.layer = self.dual.layer("2")


def of_answer(answer, stream):
    """Every question that an answer about slots knows."""
    return {
        "top": lambda: answer.top(5),
        "top absolute": lambda: answer.top(5, absolute=True),
        "top where": lambda: answer.top(3, where="label = 1"),
        "top by": lambda: answer.top(3, by="sample_id"),
        "top per": lambda: answer.top(2, per="label"),
        "best": lambda: answer.best(4, lowest=True),
        "total": lambda: answer.total("task"),
        "total of sizes": lambda: answer.total("label", absolute=True),
        "sums": lambda: answer.sums(["label", "task"])[:3],
        "visits": lambda: answer.sums("sample_id").visits,
        "stream": lambda: [(s.slots, s.scores) for s in stream()],
        "stream where": lambda: [(s.slots, s.scores) for s in stream(where=pl.col("task") == 2)],
    }


def questions(shared):
    """All questions by name."""
    dual, found = shared.dual, {}
    for layer in ("0", "2"):
        attention, contribution = shared.attention[layer], shared.contributions[layer]
        groups = {
            f"attention {layer}": of_answer(attention, attention.scores),
            f"contributions {layer}": of_answer(contribution, contribution.scores) | {"parts": contribution.parts},
            f"influence {layer}": of_answer(shared.influence[layer], shared.influence[layer].scores),
        }
        found |= {f"{what}: {name}": ask for what, asks in groups.items() for name, ask in asks.items()}
    found |= {f"influence: {name}": ask for name, ask in of_answer(shared.influence, shared.influence.scores).items()}
    return found | {
        "attend": lambda: dual.attend(QUERIES[:2])["2"].top(3),
        "contributions": lambda: dual.contributions(QUERIES[:2])["0"].top(3),
        "influence again": lambda: dual.influence(QUERIES[:2], segments=2, sample="sample_id").top(3),
        "masked": lambda: dual.masked(drop="label = 2", layers="2"),
        "masked by samples": lambda: dual.masked(only=pl.col("sample_id") < 20),
        "masked with workers": lambda: dual.masked(drop="sample_id = 3", workers=2),
        "mask_reads": lambda: dual.mask_reads(drop="sample_id = 3"),
        "model at a step": lambda: dual.at(7).model(),
        "at": lambda: dual.at(9).attend(QUERIES[:3])["0"].top(2),
        "verify": lambda: dual.verify().frame,
        "verify with workers": lambda: dual.verify(workers=2).frame["verdict"].to_list(),
        "slots": lambda: dual.slots("0"),
        "mislabelled": lambda: dual.mislabelled(5),
        "compact": lambda: dual.compact(2, layers="2")["2"].error,
        "model": lambda: dual.model(),
        "rows and log": lambda: (dual.rows, dual.log),
        "keys": lambda: shared.layer.keys,
        "initial weight": lambda: shared.layer.initial_weight,
        "forward": lambda: shared.layer(torch.ones(2, 32)),
    }


def ask_all(shared, seed):
    """Every question in an order of its own."""
    asked = list(questions(shared).items())
    random.Random(seed).shuffle(asked)
    return {name: plain(ask()) for name, ask in asked}


def test_every_question_is_answered_as_by_a_single_thread(recorded, sizes):
    expected = ask_all(Answers(*recorded), 0)
    threads = torch.get_num_threads()
    shared = Answers(*recorded)  # nothing is known yet: all threads find it out at once
    begin = threading.Barrier(THREADS)

    def work(seed):
        begin.wait()
        return ask_all(shared, seed)

    with pool_of(THREADS) as pool:
        for found in pool.map(work, range(THREADS)):
            wrong = [name for name in expected if found[name] != expected[name]]
            assert not wrong
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_answer_that_many_threads_read(tmp_path, monkeypatch, dtype):
    """The decoded keys of a float16 store once lay in memory that all threads shared."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, made, tmp_path / "run", dtype=dtype, chunk_bytes=200) as recorder:
        for _ in range(6):
            recorder.batch(label=torch.arange(8) % 4)
            made.zero_grad()
            F.cross_entropy(model(torch.randn(8, 6)), torch.arange(8) % 4).backward()
            made.step()
    attention = dualform.open(tmp_path / "run", model).attend(torch.randn(3, 6))["2"]  # its keys are all different

    def weights(begin):
        return torch.cat([scores for _, scores in attention.scores(where=pl.col("step") >= begin)], -1)

    def slow_dot(vectors, *arguments):
        time.sleep(0.002)  # others decode their keys meanwhile
        return dot(vectors, *arguments)

    expected, dot = [weights(begin) for begin in range(4)], Vectors.dot
    monkeypatch.setattr(Vectors, "dot", slow_dot)
    with pool_of(4) as pool:
        for found, right in zip(pool.map(weights, range(4)), expected, strict=True):
            assert torch.equal(found, right)


def test_warnings_are_those_of_before_when_threads_ask_for_influence(recorded):
    """warnings.catch_warnings() puts filters back that another thread has set."""
    dual = dualform.open(*recorded)
    before = list(warnings.filters)
    with pool_of(THREADS) as pool:
        for task in [pool.submit(dual.influence, QUERIES[:1], segments=[(0, 6), (6, 12), (12, 18)]) for _ in range(12)]:
            task.result()
    assert warnings.filters == before


def test_threads_that_build_the_same_curvature_do_not_spoil_it(recorded, monkeypatch):
    """All of them write the file that is kept beside the store, at the same time."""
    path, model = recorded
    settings = {"segments": [(0, STEPS)], "layers": "2"}
    expected = plain(dualform.open(path, model).influence(QUERIES, **settings).best(3))
    for file in path.glob("*curvature-*"):
        file.unlink()
    together, files = threading.Barrier(THREADS), []

    def write_together(folder, name, tensors):
        files.append(name)
        together.wait()
        write_tensors(folder, name, tensors)

    monkeypatch.setattr(cache_files, "write_tensors", write_together)
    with pool_of(THREADS) as pool:
        duals = [dualform.open(path, model) for _ in range(THREADS)]
        tasks = [pool.submit(lambda dual: plain(dual.influence(QUERIES, **settings).best(3)), dual) for dual in duals]
        assert [task.result() for task in tasks] == [expected] * THREADS
    assert plain(dualform.open(path, model).influence(QUERIES, **settings).best(3)) == expected
    assert len(files) == len(set(files)) == THREADS
    assert not list(path.glob(".curvature-*"))


class Slow(nn.Module):
    """Draws random numbers and takes its time."""

    def forward(self, x):
        time.sleep(0.01)
        return x + 1e-3 * torch.rand(x.shape)


def test_proofs_of_several_threads_leave_global_settings_alone(tmp_path):
    """Which example is which is found by running copies of the model; for that, random states and fast paths are changed."""
    model = nn.Sequential(nn.Linear(FEATURES, 4), Slow(), nn.Linear(4, CLASSES))
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, made, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(8))
        F.cross_entropy(model(INPUTS[:8]), LABELS[:8]).backward()
        made.step()
    duals = [dualform.open(tmp_path / "run", model) for _ in range(THREADS)]
    fast = torch.backends.mha.get_fastpath_enabled()
    with pool_of(THREADS) as pool:
        for task in [pool.submit(dual.attend, QUERIES) for dual in duals]:
            task.result()
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_what_is_not_recorded_is_warned_of_once(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, CLASSES))
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, made, tmp_path / "run") as recorder:
        for step in range(12):
            ids = torch.arange(8) + 2 * step
            recorder.batch(sample_id=ids)
            made.zero_grad()
            F.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
            made.step()
    dual = dualform.open(tmp_path / "run", model)
    with pytest.warns(UserWarning, match="not recorded, so taken from the snapshot") as told:
        dual.influence(QUERIES[:1], segments=[(0, 4), (4, 8)])
    assert len(told) == 1


def test_two_threads_may_record_two_models(tmp_path):
    with pool_of(2) as pool:
        tasks = [pool.submit(train, tmp_path / name, name, "float32") for name in OPTIMIZERS]
        models = [task.result() for task in tasks]
    for name, model in zip(OPTIMIZERS, models, strict=True):
        assert dualform.open(tmp_path / name, model).verify().passed
