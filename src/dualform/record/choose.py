"""Which modules of a model are recorded, and why the others are not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.layers.layer import Layer, joined
from dualform.layers.rules import parts_of, rule_for, why_left_out
from dualform.record.frozen import base_of, is_part_of
from dualform.record.optimizers import optimized_ids

Reasons = dict[str, str]
"""Why modules and parameters are not recorded, by name."""

EXCLUDED = "exclude= names it"
NOT_OPTIMIZED = "its weight is in no optimizer that was given"


@dataclass(frozen=True)
class ChosenModule:
    """A module to be recorded, with its layers and the parameters that they use, by full name."""

    name: str
    module: nn.Module
    layers: list[Layer]
    parameters: dict[str, nn.Parameter]

    @property
    def parameter_ids(self) -> set[int]:
        """The ids of its parameters."""
        return {id(parameter) for parameter in self.parameters.values()}

    def uses(self, names: Collection[str]) -> bool:
        """Whether it uses a parameter of one of these names."""
        return any(name in names for name in self.parameters)

    @property
    def is_frozen(self) -> bool:
        """Whether none of its parameters is trained."""
        return not any(parameter.requires_grad for parameter in self.parameters.values())


@dataclass
class Choice:
    """Which modules of a model are recorded, in the model's order."""

    recorded: list[ChosenModule] = field(default_factory=list)
    waiting: list[ChosenModule] = field(default_factory=list)
    """Those whose parameters are in no optimizer: `add_param_group` may bring them in during training."""
    left_out: Reasons = field(default_factory=dict)
    base: dict[str, nn.Parameter] = field(default_factory=dict)
    """The frozen weights that are not stored, by name (`frozen.base_of`)."""

    @property
    def modules(self) -> list[ChosenModule]:
        """Those that are recorded, and those that may be later."""
        return [*self.recorded, *self.waiting]

    def add(self, chosen: ChosenModule, optimized: Collection[int]) -> None:
        """Add a module. optimized: the ids of the parameters that an optimizer has."""
        if not chosen.parameter_ids.isdisjoint(optimized):
            self.recorded.append(chosen)
            return
        self.waiting.append(chosen)
        if not chosen.is_frozen:  # what is frozen was not forgotten
            self.left_out[chosen.name] = NOT_OPTIMIZED


def choose(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    layers: str | Collection[str] | None = None,
    exclude: str | Collection[str] | Mapping[str, str] = (),
) -> Choice:
    """Choose the modules to record. `layers` and `exclude` are those of `record()`."""
    wanted = _wanted_modules(model, layers)
    excluded = _why_excluded(wanted, exclude)
    optimized = optimized_ids(optimizers)
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    choice = Choice()
    for name, module in wanted.items():
        reason = excluded[name] if name in excluded else why_left_out(module)
        if reason is None:
            choice.add(_described(name, module, parameter_names), optimized)
        elif name in excluded or _is_trained(module):  # what is frozen was not forgotten
            choice.left_out[name] = reason

    # A module that is left out here may in turn share parameters with others
    while shared := _why_shared(model, choice.recorded):
        choice.left_out |= shared
        choice.recorded = [chosen for chosen in choice.recorded if chosen.name not in shared]
    if not choice.recorded:
        raise RecordingError(f"the model has no layer to record. {_why_nothing(choice)}")

    if layers is None:
        uncovered = optimized - parameter_ids(choice.modules)
        choice.left_out |= _why_uncovered(model, uncovered, choice)
    choice.base = base_of(model, optimizers, parameter_ids(choice.recorded))
    choice.waiting = [chosen for chosen in choice.waiting if not chosen.uses(choice.base)]
    return choice


def parameter_ids(modules: Iterable[ChosenModule]) -> set[int]:
    """The ids of all parameters that these modules use."""
    ids: set[int] = set()
    for chosen in modules:
        ids |= chosen.parameter_ids
    return ids


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that fit a glob."""
    return [name for name in names if fnmatchcase(name, pattern)]


def _wanted_modules(model: nn.Module, layers: str | Collection[str] | None) -> dict[str, nn.Module]:
    """The modules that a rule covers and that `layers` names, by name."""
    parts: set[nn.Module] = set()
    for module in model.modules():
        parts.update(parts_of(module))
    known = {}
    for name, module in model.named_modules():
        has_parameters = next(module.parameters(), None) is not None
        if rule_for(module) is not None and has_parameters and module not in parts:
            known[name] = module
    if not layers:
        return known
    patterns = [layers] if isinstance(layers, str) else layers
    _refuse_unknown("layers", patterns, known)
    wanted: set[str] = set()
    for pattern in patterns:
        wanted.update(matching(known, pattern))
    return {name: module for name, module in known.items() if name in wanted}


def _why_excluded(names: Collection[str], exclude: str | Collection[str] | Mapping[str, str]) -> Reasons:
    """The reasons for modules that `exclude` names, by name."""
    if isinstance(exclude, str):
        exclude = [exclude]
    if not isinstance(exclude, Mapping):
        exclude = dict.fromkeys(exclude, EXCLUDED)
    _refuse_unknown("exclude", exclude, names)
    reasons: Reasons = {}
    for pattern, reason in exclude.items():
        for name in matching(names, pattern):
            reasons.setdefault(name, reason)
    return reasons


def _refuse_unknown(argument: str, patterns: Collection[str], names: Collection[str]) -> None:
    """Refuse names and globs that fit none of these names."""
    unknown = [pattern for pattern in patterns if not matching(names, pattern)]
    if unknown:
        known = ", ".join(map(repr, names))
        raise RecordingError(f"{argument}={unknown} names no layer that can be recorded. There are: {known or 'none'}.")


def _described(name: str, module: nn.Module, parameter_names: Mapping[int, str]) -> ChosenModule:
    """A module with its layers. parameter_names: full names by the parameters' ids."""

    def full_name(short: str) -> str:
        return parameter_names[id(module.get_parameter(short))]

    rule = rule_for(module)
    assert rule is not None
    layers = rule.layers(module, name, full_name)
    used: set[str] = set()
    for layer in layers:
        used.update(layer.parameters)
    parameters = {}
    for parameter in module.parameters():
        full = parameter_names[id(parameter)]
        if full in used:
            parameters[full] = parameter
    return ChosenModule(name, module, layers, parameters)


def _why_shared(model: nn.Module, recorded: Sequence[ChosenModule]) -> Reasons:
    """Why modules are left out that share a parameter with one that is not recorded: some of its slots would be missing."""
    others = _users_outside(model, recorded)
    reasons = {}
    for chosen in recorded:
        for parameter in chosen.parameters.values():
            names = others.get(id(parameter), [])
            if names:
                verb = "is" if len(names) == 1 else "are"
                reasons[chosen.name] = f"its weight is shared by {' and '.join(names)}, which {verb} not recorded"
    return reasons


def _users_outside(model: nn.Module, recorded: Sequence[ChosenModule]) -> dict[int, list[str]]:
    """The quoted names of modules that are not recorded, by the ids of their parameters."""
    inside: set[nn.Module] = set()
    for chosen in recorded:
        inside.add(chosen.module)
        inside.update(parts_of(chosen.module))
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if module in inside:
            continue
        for parameter in module.parameters(recurse=False):
            names.setdefault(id(parameter), []).append(repr(name))
    return names


def _why_nothing(choice: Choice) -> str:
    if choice.left_out:
        return summary(choice.left_out)
    return "All its layers are frozen." if choice.waiting else "It has no layer of a known type."


def _why_uncovered(model: nn.Module, uncovered: Collection[int], choice: Choice) -> Reasons:
    """The reasons for trained parameters that are in no layer, by name. uncovered: their ids."""
    reasons = {}
    for name, module in model.named_modules():
        if is_part_of(name, choice.left_out):
            continue
        for short, parameter in module.named_parameters(recurse=False):
            if id(parameter) in uncovered:
                reasons[joined(name, short)] = f"no rule covers a parameter of {type(module).__name__}"
    return reasons


def summary(left_out: Reasons) -> str:
    """What was left out, and why. The same part of several blocks is named once: 'layers.*.experts.down_proj' (32 of them)."""
    names_by_pattern: dict[tuple[str, str], list[str]] = {}
    for name, reason in left_out.items():
        parts = ["*" if part.isdecimal() else part for part in name.split(".")]
        pattern = ".".join(parts)
        names_by_pattern.setdefault((pattern, reason), []).append(name)
    entries = []
    for (pattern, reason), names in names_by_pattern.items():
        if len(names) == 1:
            entries.append(f"{names[0]!r}: {reason}")
        else:
            entries.append(f"{pattern!r} ({len(names)} of them): {reason}")
    return "; ".join(entries)
