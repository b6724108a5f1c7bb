"""Ways of training that spread a model over processes or devices: they are refused by name before anything is recorded.

They are recognised by the names of classes, so that none of these libraries is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from dualform.errors import RecordingError

COPIES = "runs copies of the model, whose slots would have to be put together"
SHARDS = "splits weights and gradients over processes, and slots with them"
STAGES = "runs parts of the model in several processes, and a batch in pieces"


@dataclass(frozen=True)
class Setup:
    """A way of training that is not recorded."""

    name: str
    classes: str
    """A pattern for the full names of classes by which a model, a parameter or an optimizer tells that it is in use."""
    why: str
    cure: str


SETUPS = (
    Setup(
        "DistributedDataParallel within a model",
        "torch.nn.parallel.distributed.*",
        COPIES,
        "or give record() what it wraps",
    ),
    Setup("DataParallel", "torch.nn.parallel.data_parallel.*", COPIES, "with record(model.module, …)"),
    Setup("FSDP", "torch.distributed.fsdp.*", SHARDS, "without FullyShardedDataParallel or fully_shard()"),
    Setup("FSDP", "fairscale.*", SHARDS, "without fairscale"),
    Setup("FSDP", "torch_xla.distributed.fsdp.*", SHARDS, "without it"),
    Setup("DeepSpeed", "deepspeed.runtime.*", SHARDS, "without deepspeed.initialize()"),
    Setup("DeepSpeed", "deepspeed.pipe.*", STAGES, "without deepspeed.pipe"),
    Setup("pipeline parallelism", "torch.distributed.pipelining.*", STAGES, "without torch.distributed.pipelining"),
    Setup("Megatron", "megatron.*", SHARDS, "with layers of torch.nn"),
    Setup("Colossal-AI", "colossalai.*", SHARDS, "without its Booster"),
    Setup("Horovod", "horovod.*", COPIES, "without DistributedOptimizer"),
    Setup("ZeroRedundancyOptimizer", "torch.distributed.optim.*", SHARDS, "with the plain optimizer"),
    Setup("tensor parallelism", "torch.distributed.tensor.*", SHARDS, "without parallelize_module() or tp_plan="),
    Setup("tensor parallelism", "torch.distributed._shard.*", SHARDS, "without sharded tensors"),
)
"""The first that fits is named: FSDP makes tensors like those of tensor parallelism."""
ZERO = "deepspeed.runtime.zero"
"""ZeRO-3 splits ordinary parameters, and marks them."""


@dataclass(frozen=True)
class Part:
    """Something in which a way of training can be recognised."""

    classes: tuple[str, ...]
    where: str


def refuse_unsupported(model: object, optimizer: object) -> None:
    """Refuse what is spread over processes or devices. model, optimizer: whatever was given to record()."""
    parts = [*_parts_of_model(model), *_parts_of_optimizer(optimizer)]
    for setup in SETUPS:
        for part in parts:
            if any(fnmatchcase(name, setup.classes) for name in part.classes):
                raise RecordingError(
                    f"{setup.name} {setup.why}: not recorded yet ({part.where}). Train the plain model in one process on one "
                    f"device, {setup.cure}."
                )


def _parts_of_model(model: object) -> Iterator[Part]:
    """The classes of modules and parameters, each once."""
    if not isinstance(model, nn.Module):
        yield Part(_classes(model), f"the model is of class {type(model).__name__}")
        return
    seen: set[type] = set()
    for name, found in (*model.named_modules(), *model.named_parameters()):
        what = repr(name) if name else "the model"
        if hasattr(found, "ds_id"):
            yield Part((f"{ZERO}.",), f"{what} was split by ZeRO-3")
        if type(found) not in seen:
            seen.add(type(found))
            yield Part(_classes(found), f"{what} is of class {type(found).__name__}")


def _parts_of_optimizer(given: object) -> Iterator[Part]:
    """The classes of optimizers and of what they are wrapped in."""
    for one in given if isinstance(given, (list, tuple)) else [given]:
        while one is not None:
            yield Part(_classes(one), f"the optimizer is of class {type(one).__name__}")
            one = getattr(one, "optimizer", None)


def _classes(found: object) -> tuple[str, ...]:
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(found).__mro__)
