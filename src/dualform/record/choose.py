"""Which modules of a model are recorded, and why the others are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.layers.rules import parts_of, rule_for, why_left_out
from dualform.layers.streams import Layer
from dualform.store import format as store


@dataclass(frozen=True)
class Chosen:
    """A module to be recorded, with its layers and the parameters that they use, by full name."""

    name: str
    module: nn.Module
    layers: list[Layer]
    parameters: dict[str, nn.Parameter]


EXCLUDED = "exclude= names it"
NOT_OPTIMIZED = "its weight is in no optimizer that was given"


def choose(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    wanted: str | Collection[str] | None,
    exclude: str | Collection[str] | Mapping[str, str] = (),
    outputs: Mapping[str, Sequence[int]] | None = None,
) -> tuple[list[Chosen], list[Chosen], dict[str, str]]:
    """The modules to record, in the model's order; those that only lack an optimizer; the reasons for all left out."""
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in model.named_parameters()}
    patterns = [wanted] if isinstance(wanted, str) else list(wanted or ["*"])
    excluded = [exclude] if isinstance(exclude, str) else list(exclude)
    reasons = exclude if isinstance(exclude, Mapping) else {}
    matched: set[str] = set()
    used: set[str] = set()
    chosen, waiting, left_out = list[Chosen](), list[Chosen](), dict[str, str]()
    inside = {id(inner) for module in model.modules() for inner in parts_of(module)}
    for name, module in model.named_modules():
        rule = rule_for(module)
        if rule is None or id(module) in inside or not any(True for _ in module.parameters()):
            continue
        fits = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if not fits:
            continue
        matched.update(fits)
        excluding = [pattern for pattern in excluded if fnmatchcase(name, pattern)]
        if excluding:
            used.update(excluding)
            left_out[name] = reasons.get(excluding[0], EXCLUDED)
            continue
        reason = why_left_out(module)
        if reason is not None:
            left_out[name] = reason
            continue
        layers = rule.layers(module, name, lambda short, module=module: names[id(module.get_parameter(short))])  # type: ignore[misc]
        full = {
            names[id(p)]: p for p in module.parameters() if names[id(p)] in {n for y in layers for n in y.parameters}
        }
        one = Chosen(name, module, [_narrowed(layer, outputs or {}) for layer in layers], full)
        if any(id(p) in optimized for p in full.values()):
            chosen.append(one)
        else:
            waiting.append(one)
            if any(p.requires_grad for p in full.values()):  # what is frozen was not forgotten
                left_out[name] = NOT_OPTIMIZED
    unmatched = [pattern for pattern in patterns if pattern not in matched and wanted is not None]
    unused = [pattern for pattern in excluded if pattern not in used]
    for argument, missing in (("layers", unmatched), ("exclude", unused)):
        if missing:
            known = ", ".join(repr(name) for name, module in model.named_modules() if rule_for(module))
            raise RecordingError(
                f"{argument}={missing} names no layer that can be recorded. There are: {known or 'none'}."
            )
    chosen = _whole(model, chosen, left_out)
    if not chosen:
        why = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        none = "All its layers are frozen." if waiting else "It has no layer of a known type."
        raise RecordingError(f"the model has no layer to record. {why or none}")
    _check_outputs(chosen, outputs or {})
    if wanted is None:
        left_out.update(_uncovered(model, [*chosen, *waiting], left_out, optimized))
    return chosen, waiting, left_out


def _narrowed(layer: Layer, outputs: Mapping[str, Sequence[int]]) -> Layer:
    """A layer of which only some output units' error signals are kept."""
    if layer.name not in outputs:
        return layer
    units = sorted({int(unit) for unit in outputs[layer.name]})
    if not units or not 0 <= units[0] <= units[-1] < layer.d_out:
        raise RecordingError(f"outputs={{{layer.name!r}: …}}: expected some units from 0 to {layer.d_out - 1}.")
    if not layer.bilinear() or any(
        use.role != "weight" or use.rows or use.groups > 1 or use.errors for use in layer.bilinear()
    ):
        raise RecordingError(
            f"outputs={{{layer.name!r}: …}}: only for layers like nn.Linear, whose rows are independent."
        )
    return replace(layer, outputs=tuple(units))


def _check_outputs(chosen: Sequence[Chosen], outputs: Mapping[str, Sequence[int]]) -> None:
    layers = [layer for one in chosen for layer in one.layers]
    for name in outputs:
        if name not in {layer.name for layer in layers}:
            known = ", ".join(repr(layer.name) for layer in layers)
            raise RecordingError(f"outputs names {name!r}, which is not recorded. Recorded layers: {known}.")
    for layer in layers:
        tied = [other.name for other in layers if other is not layer and set(other.parameters) & set(layer.parameters)]
        if layer.outputs and tied:
            raise RecordingError(
                f"outputs={{{layer.name!r}: …}}: its weight is shared with {', '.join(map(repr, tied))}, which needs all of it."
            )


def _whole(model: nn.Module, chosen: list[Chosen], left_out: dict[str, str]) -> list[Chosen]:
    """Without modules whose parameters are used by others too that are not recorded: their slots would not be all."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(name)
    while True:
        names = {one.name for one in chosen} | {f"{one.name}.out_proj".lstrip(".") for one in chosen}
        lost = {}
        for one in chosen:
            for p in one.parameters.values():
                others = [name for name in owners[id(p)] if name not in names]
                if others:
                    lost[one.name] = f"its weight is shared by {' and '.join(map(repr, others))}, which is not recorded"
        if not lost:
            return chosen
        left_out.update(lost)
        chosen = [one for one in chosen if one.name not in lost]


def _uncovered(
    model: nn.Module, covered: Sequence[Chosen], left_out: Mapping[str, str], optimized: Collection[int]
) -> dict[str, str]:
    """Parameters that no rule covers."""
    ids = {id(p) for one in covered for p in one.parameters.values()}
    found = {}
    for name, module in model.named_modules():
        if any(name == lost or name.startswith(f"{lost}.") for lost in left_out):
            continue
        for short, p in module._parameters.items():
            if p is not None and id(p) not in ids and id(p) in optimized:
                found[f"{name}.{short}" if name else short] = f"no rule covers a parameter of {type(module).__name__}"
    return found


def in_short(left_out: Mapping[str, str]) -> str:
    """What was left out, and why, with the same part of several blocks named once: 'layers.*.experts.down_proj' (32 of them)."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in left_out.items():
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        alike.setdefault((pattern, reason), []).append(name)
    said = []
    for (pattern, reason), names in alike.items():
        which = repr(names[0]) if len(names) == 1 else f"{pattern!r} ({len(names)} of them)"
        said.append(f"{which}: {reason}")
    return "; ".join(said)


def described(parameters: Mapping[str, nn.Parameter]) -> list[store.Parameter]:
    """How a store describes parameters."""
    return [store.Parameter(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in parameters.items()]
