"""The user's model with the weights of a recording, at any step of training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from dualform.dual.coefficients import not_replayed
from dualform.dual.weights import Reached, rebuilt
from dualform.errors import ModelMismatchError, NotRecordedError, QuestionError
from dualform.layers.module_copy import rebind_forwards
from dualform.progress import Progress, report
from dualform.store.collection import collection_of
from dualform.store.reader import Store
from dualform.store.tensors import tensor_checksum


class Network:
    """Plain copies of a model with weights from the store. The model itself is not changed."""

    def __init__(self, store: Store, model: nn.Module | None):
        """model: gives the architecture; None: weights can be had, modules cannot."""
        if model is not None:
            _check_parameters(store, model)
            _check_base(store, model)
        self._store = store
        self._model = model
        self._aliases = _aliases(model)
        """Other names of parameters that several modules share."""

    @property
    def has_model(self) -> bool:
        """Whether the architecture is known."""
        return self._model is not None

    def module(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the model with these weights, in evaluation mode."""
        if self._model is None:
            raise QuestionError("this needs the model: dualform.open(path, model).")
        # What the store does not have stays as it is, so it need not be copied: it may be large, or quantised
        shared = {id(p): _alias(p) for name, p in self._model.named_parameters() if name in self._store.manifest.base}
        module = copy.deepcopy(self._model, shared)
        rebind_forwards(self._model, module)
        self.load(module, weights)
        return module.eval()

    def load(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Put weights into a copy that `module()` returned."""
        with torch.no_grad():
            for name, value in module.state_dict(keep_vars=True).items():
                is_given = name in weights and name not in self._aliases
                if is_given and isinstance(value, Tensor) and not nn.parameter.is_lazy(value):
                    value.data.copy_(weights[name])

    def weights_at(
        self,
        step: int,
        *,
        progress: Progress | None = None,
        reached: Reached | None = None,
        without: Collection[str] = (),
        warned: set[str] | None = None,
    ) -> dict[str, Tensor]:
        """Return all parameters and buffers after `step` updates: recorded ones exactly, others from the snapshot before.

        reached: how far optimizers were replayed for an earlier step, to continue from there. without: recorded parameters that
        need not be right. warned: names that the user was warned of already; new ones are added.
        """
        nearest = max(snapshot for snapshot in self._store.snapshot_steps() if snapshot <= step)
        weights = self._snapshot_weights(nearest)
        if nearest == step or collection_of(self._store) is not None:
            return weights  # of a collection, until the next checkpoint
        manifest = self._store.manifest
        if not manifest.keeps_gradients:
            kept = f"{manifest.keep} only" if manifest.every == 1 else f"one step in {manifest.every} only"
            raise NotRecordedError(
                f"{self._store.location} keeps {kept}: the network is "
                f'known after {self._store.snapshot_steps()} steps, not after {step}. Record with keep="slots" to have every step.'
            )
        recorded = [parameter.name for parameter in manifest.parameters]
        others = weights.keys() - recorded - self._aliases - self._frozen(weights)
        _warn_of_snapshot(others, nearest, step, warned)
        wanted = [name for name in recorded if name not in without]
        for name in report("rebuilding", wanted, progress):
            check_all_outputs(self._store, name, f"the network after step {step}")
            weights[name] = rebuilt(self._store, name, begin=nearest, end=step, reached=reached)
        return weights

    def _snapshot_weights(self, step: int) -> dict[str, Tensor]:
        """Return the weights of a snapshot, with frozen ones from the last snapshot before it that has them."""
        weights: dict[str, Tensor] = {}
        # A frozen weight is in the first snapshot, and again in those before which somebody has changed it
        steps = [snapshot for snapshot in self._store.snapshot_steps() if snapshot <= step]
        for earlier in sorted(steps, reverse=True):
            snapshot = self._store.snapshot(earlier)
            for name in snapshot:
                short = name.removeprefix("model.")
                if name != short and short not in weights:
                    weights[short] = snapshot[name]
        return weights

    def _frozen(self, weights: Collection[str]) -> set[str]:
        """Return the weights that the last snapshot does not have."""
        last = self._store.snapshot(self._store.snapshot_steps()[-1])
        return {name for name in weights if f"model.{name}" not in last}

    def step_with_weights(self, step: int) -> int:
        """The step itself, if its weights are known; else that of the nearest snapshot.

        They are not where an optimizer cannot be replayed, or where gradients cannot be put together again from what is kept. A
        snapshot is made by recorder.seal(), and at the beginning and the end.
        """
        is_rebuilt = self._store.manifest.keeps_gradients and not not_replayed(self._store, self._store.end_step)
        if collection_of(self._store) is not None or is_rebuilt:
            return step
        return min(self._store.snapshot_steps(), key=lambda snapshot: abs(snapshot - step))


def check_all_outputs(store: Store, parameter: str, question: str) -> None:
    """Raise an error if only the error signals of some outputs were kept."""
    if any(layer.outputs for layer in store.users(parameter)):
        raise NotRecordedError(
            f"{question} needs all error signals of {parameter!r}, but only those of some output units were kept (outputs=). "
            f"Leave its layer out with layers=, or ask for a step that has a snapshot: {store.snapshot_steps()}."
        )


def _warn_of_snapshot(names: set[str], nearest: int, step: int, warned: set[str] | None) -> None:
    if warned is not None:
        names = names - warned
        warned |= names
    if names:
        warnings.warn(
            f"not recorded, so taken from the snapshot at step {nearest} instead of step {step}: "
            f"{', '.join(sorted(names))}",
            stacklevel=5,
        )


def _aliases(model: nn.Module | None) -> set[str]:
    if model is None:
        return set()
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter with the same memory, if it is an ordinary one: a copy of the model may change whether it needs a gradient."""
    if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
        return parameter
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


def _check_base(store: Store, model: nn.Module) -> None:
    """Raise an error unless the model has the frozen weights that training ran on, which are not stored."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, known in store.manifest.base.items():
        if name not in parameters or tensor_checksum(parameters[name]) != known:
            raise ModelMismatchError(
                f"the frozen weight {name!r} is not the one that training ran on. It is not stored, so it must come from your model: load "
                f"the base model that was fine-tuned, in the same precision, with adapters that are not merged."
            )


def _check_parameters(store: Store, model: nn.Module) -> None:
    """Raise an error unless the model has the parameters that were recorded."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if not nn.parameter.is_lazy(p)}
    for parameter in store.manifest.parameters:
        if parameter.name not in shapes:
            raise ModelMismatchError(
                f"the recording has a parameter {parameter.name!r}, the model has none of that name. Open it with the "
                f"architecture that was recorded. The model has: {', '.join(list(shapes)[:8])}"
                f"{', …' if len(shapes) > 8 else ''}."
            )
        if shapes[parameter.name] != parameter.shape:
            raise ModelMismatchError(
                f"{parameter.name!r} has shape {parameter.shape} in the recording and {shapes[parameter.name]} in the "
                f"model. Open it with the architecture that was recorded."
            )
