"""Which layers of a model are recorded, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.layers.rules import Rule, refusal, rule_for
from dualform.store import format as store


@dataclass(frozen=True)
class Chosen:
    """A layer to be recorded."""

    name: str
    module: nn.Module
    rule: Rule


NOT_OPTIMIZED = "its weight is in no optimizer given to record()"


def choose(
    model: nn.Module, optimizers: Sequence[Optimizer], wanted: str | Collection[str] | None
) -> tuple[list[Chosen], list[Chosen], dict[str, str]]:
    """The layers to record, in the model's order; those that only lack an optimizer; the reasons for all left out."""
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    shared: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None and uses[id(p)] > 1:
                shared.setdefault(id(p), []).append(name)
    patterns = [wanted] if isinstance(wanted, str) else list(wanted or ["*"])
    matched: set[str] = set()
    chosen, waiting, left_out = [], [], {}
    for name, module in model.named_modules():
        rule = rule_for(module)
        fits = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if rule is None or not fits:
            continue
        matched.update(fits)
        reason = refusal(module)
        if reason is None:
            weight = module.weight
            if id(weight) in shared:
                reason = f"its weight is shared by {' and '.join(map(repr, shared[id(weight)]))}"
            elif id(weight) not in optimized:
                reason = NOT_OPTIMIZED
        if reason is None:
            chosen.append(Chosen(name, module, rule))
        else:
            left_out[name] = reason
            if reason == NOT_OPTIMIZED:
                waiting.append(Chosen(name, module, rule))
    unmatched = [pattern for pattern in patterns if pattern not in matched]
    if wanted is not None and unmatched:
        known = ", ".join(repr(name) for name, module in model.named_modules() if rule_for(module))
        raise RecordingError(f"layers={unmatched} names no layer that can be recorded. There are: {known or 'none'}.")
    if not chosen:
        why = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        raise RecordingError(f"the model has no layer to record. {why or 'It has no nn.Linear.'}")
    return chosen, waiting, left_out


def described(layer: Chosen, names: dict[str, str]) -> tuple[store.Layer, list[store.Parameter]]:
    """How a store describes a layer and its parameters. names: short name → full name."""
    d_out, d_in = layer.module.weight.shape  # type: ignore[misc]
    entered = store.Layer(layer.name, layer.rule.kind, int(d_in), int(d_out), names["weight"], names.get("bias"))
    parameters = [
        store.Parameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for name, p in ((name, getattr(layer.module, short)) for short, name in names.items())
    ]
    return entered, parameters
