"""Layers that are called with the same input, such as the projections of an attention, store it once."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

import dualform
from dualform.store import memory
from recorded_networks import assert_exact

WIDTH, TIME, ROWS, STEPS = 6, 5, 4, 5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        weights = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        return weights @ self.value(x)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), nn.Linear(WIDTH, 3)).double()


def record(path, model, *, change=lambda model, step: None, autocast=False, **options):
    # float64 tells the sums apart; autocast needs weights of float32
    model = model.float() if autocast else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizer, path, **options) as recorder:
        for step in range(STEPS):
            x = torch.randn(ROWS, TIME, WIDTH, generator=generator, dtype=torch.float64)
            recorder.batch(sample_id=range(ROWS))
            change(model, step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x.float() if autocast else x).square().mean()
            loss.backward()
            optimizer.step()
    return dualform.open(path, model)


def stored(path):
    """The tensors that are written in the first chunk, and the other names of some of them."""
    file = min(path.glob("chunk-*/slots.safetensors"))
    with safe_open(file, "pt") as tensors:
        return set(tensors.keys()), json.loads(tensors.metadata().get("dualform.aliases", "{}"))


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"keep": "keys"}, {"chunk_bytes": 1}])
def test_projections_of_one_input_store_it_once(path, options):
    dual = record(path, make(), **options)
    names = [layer.name for layer in dual.store.manifest.layers]
    numbers = {name: names.index(name) for name in names}
    written, aliases = stored(path)
    projections = {f"{numbers[f'1.{name}']}.keys" for name in ("query", "key", "value")}
    assert len(projections & written) == 1
    assert projections - written <= aliases.keys()
    x = torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    query, key, value = (dual.attend(x)[f"1.{name}"].top(12) for name in ("query", "key", "value"))
    assert query.equals(key)  # the same keys and the same queries
    assert query.equals(value)
    if options.get("keep") != "keys":
        assert dual.verify().passed


def test_the_slots_are_those_of_a_recording_of_each_alone(path, tmp_path):
    assert_exact(record(path, make()))
    whole = dualform.open(path, make())
    for name in ("query", "key", "value"):
        alone = record(tmp_path / name, make(), layers=f"1.{name}")
        for mine, its in zip(whole.store.chunks(f"1.{name}"), alone.store.chunks(f"1.{name}"), strict=True):
            assert torch.equal(mine.keys(torch.float64).vectors(), its.keys(torch.float64).vectors())
            assert torch.equal(mine.errors(torch.float64), its.errors(torch.float64))


def test_keys_of_some_steps_are_stored_apart(path):
    """A projection that is frozen for a while has no slots then, and so other keys in the chunk."""

    def freeze(model, step):
        model[1].key.requires_grad_(step != 2)

    dual = record(path, make(), change=freeze)
    assert dual.verify().passed
    _, aliases = stored(path)
    assert len(aliases) == 1  # query and value


def test_optimizers_that_step_apart_do_not_overwrite_shared_keys(path, monkeypatch):
    """The slots of one projection are written, and their memory is used again, before those of another one."""
    monkeypatch.setattr(memory, "BLOCKS", 1)
    model = make()
    parts = [list(model[1].query.parameters()), [p for n, p in model.named_parameters() if n != "1.query.weight"]]
    optimizers = [torch.optim.SGD(part, lr=1e-2) for part in parts]
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizers, path) as recorder:
        for step in range(8):
            recorder.batch(sample_id=range(ROWS))
            model(torch.randn(ROWS, TIME, WIDTH, generator=generator, dtype=torch.float64)).square().mean().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            recorder.seal()
            if step % 2:
                optimizers[1].step()
                optimizers[1].zero_grad()
    assert dualform.open(path, model).verify().passed


def test_autocast(path):
    dual = record(path, make(), autocast=True)
    assert dual.verify().passed
    assert len(stored(path)[1]) == 2
