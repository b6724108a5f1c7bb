"""A store of any size, written by the writer itself, without a training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dualform.layers.layer import Layer, Use
from dualform.store.encoding import encode
from dualform.store.files import folder_at
from dualform.store.format import VERSION, Column, Manifest, Parameter
from dualform.store.memory import Pool
from dualform.store.records import Block, Rows, Step, Update
from dualform.store.writer import Writer


def write(
    folder: Path,
    *,
    slots: int,
    d_in: int,
    d_out: int,
    dtype: str = "float32",
    batch: int = 1024,
    chunk_bytes: int = 64 << 20,
) -> None:
    """One layer, "map"; plain SGD; rows with a sample_id and a label."""
    names = {"map.weight": (d_out, d_in), "map.bias": (d_out,)}
    manifest = Manifest(
        version=VERSION,
        created_by="bench/synthetic.py",
        keep="slots",
        dtype=dtype,
        layers=(Layer("map", "linear", d_in, d_out, (Use("map.weight", "weight"), Use("map.bias", "bias"))),),
        parameters=tuple(Parameter(name, shape, "float32") for name, shape in names.items()),
        left_out={},
        batch_axis={},
        settings={"seed": "0"},
    )
    columns = (Column("sample_id", "Int64", "row"), Column("label", "Int64", "row"))
    weights = {f"model.{name}": torch.zeros(shape) for name, shape in names.items()}
    pool = Pool()
    writer = Writer(folder_at(folder), manifest, pool, weights, chunk_bytes=chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    keys, errors = torch.randn(batch, d_in, generator=generator), torch.randn(batch, d_out, generator=generator)
    zeros = dict.fromkeys(("momentum", "dampening", "weight_decay", "nesterov", "maximize", "fresh"), 0.0)
    settings = [{"lr": 1e-3, **zeros}] * 2
    for number in range(-(-slots // batch)):
        first, ids = number * batch, np.arange(number * batch, (number + 1) * batch) % 60_000
        step = Step(number, [Rows(first, batch, {"sample_id": ids, "label": ids % 10})])
        stored = encode(keys.roll(number, 1), dtype, pool, "key"), encode(errors, dtype, pool, "error")
        step.blocks.append(Block(0, 0, 0, first, batch, 1, *stored, may_repeat=False))
        step.updates.append(
            Update("sgd", [0, 1], settings, [[1.0], [1.0]], [0.0, 0.0], [1.0, 1.0], [None, errors.sum(0).numpy()])
        )
        writer.put(step, columns)
    writer.snapshot(-(-slots // batch), weights)
    writer.close("closed")
