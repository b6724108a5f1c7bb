"""One parameter while it is recorded: what each backward pass added to its gradient, and whether anything else changed it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.layers.keys import Keys, in_groups, select_columns
from dualform.layers.layer import Use
from dualform.projection import LARGE, SLACK, SMALL, Projected, Projection, norm_of_tensor, wide_enough
from dualform.record import audit

THROWN = 8
"""How many backward passes are kept after their gradients were thrown away."""
FAR = 1e30
"""What was known to be this large may be infinite when it is looked at, in float32."""
PARTS = 8
"""Between steps, one part in so many of a weight is looked at, another one each time."""


@dataclass(slots=True)
class PassShare(audit.Share):
    """What one backward pass added to a parameter's gradient."""

    task: int = field(kw_only=True)
    counted: bool = False
    coarse_dtype: torch.dtype | None = None
    """The 16-bit type that the gradient was computed in (autocast), if any."""
    partial_sums: int = 0
    """How many sums were rounded to that type before they were added up."""
    rounded_inside: bool = False
    """Whether terms or partial sums were rounded elsewhere than here: in a fused kernel of the training."""
    audited: bool = True
    """False: its slots are keys alone, which explain no gradient."""


def mark_of(parameter: Tensor) -> tuple[int, int]:
    """What a change that PyTorch counts would change."""
    return parameter._version, parameter.data_ptr()


def roundoff(tensor: Tensor) -> float:
    """The unit roundoff of the type that gradients of a tensor are summed in."""
    return torch.finfo(wide_enough(tensor.dtype)).eps / 2


def norm_of(flat: np.ndarray[Any, Any]) -> float:
    """The Euclidean norm of a flat array."""
    wide = flat.astype(np.float64, copy=False)  # squares may leave the range of float32
    return math.sqrt(np.add.reduce(wide * wide))  # few numbers: a call of BLAS takes longer


def norm_of_rows(norms: Tensor, rows: Tensor) -> float:
    """The Euclidean norm of a matrix, given the norms of its rows."""
    norm = norm_of(norms.cpu().numpy())
    return norm if SMALL < norm < LARGE else norm_of_tensor(rows)


class RecordedParameter:
    """One parameter: the backward passes since its last update, and what it looked like after that.

    Changes that PyTorch counts (`_version`) between an update and the next are always looked into. Edits through .data leave no such
    trace: of a weight, an eighth of the rows is compared each time, so an edit of the whole weight never passes; of a bias all of it.
    """

    def __init__(self, number: int, name: str, parameter: nn.Parameter, seed: int, *, vector: bool):
        """vector: a bias, or an elementwise weight of any shape."""
        self.number, self.name, self.tensor = number, name, parameter
        self.is_matrix, self.shape = not vector, tuple(parameter.shape)
        projection = Projection.of(name, self.shape, parameter.dtype, seed, vector=vector)
        self.projection = projection
        self.random, self.columns = projection.random, projection.columns
        rows, inputs = projection.rows, projection.random.shape[0]
        self.rows, self.roundoff = rows, roundoff(parameter)
        self.shares: list[PassShare] = []
        # Between steps, a part of its rows is looked at, of a vector all of them
        self.part = max(1, -(-rows // PARTS) if self.is_matrix else rows)
        # A weight of few rows has fewer parts: none of them may be empty
        self.turns = max(1, -(-rows // self.part))
        self._turn = 1 % self.turns
        """The part that is compared next."""
        self.slack = SLACK * self.roundoff * math.sqrt(inputs)
        """What passes as rounding, relative to the size of what is seen."""
        self.remember()

    def project(self, tensor: Tensor) -> Projected:
        """A tensor like the parameter (or some of its rows) as the audit sees it."""
        return self.projection.project(tensor)

    def random_like(self, tensor: Tensor) -> Tensor:
        """R in the type and place of a tensor."""
        return self.projection.random_like(tensor)

    # Watching it between steps

    def remember(self, value: Tensor | None = None) -> None:
        """It has just been updated. value: what it is, if not the parameter's own value."""
        self.seen = self.project(self.tensor if value is None else value)
        self._mark = mark_of(self.tensor)

    @property
    def fingerprint(self) -> float:
        """One number that tells what was remembered: r · (W R)."""
        return self.projection.fingerprint(self.seen)

    @property
    def size(self) -> float:
        """About how large the fingerprint can be: the norm of what was remembered."""
        return norm_of(self.seen)

    def _next_part(self) -> tuple[Projected, Tensor]:
        """What it was, and what is to be compared with that before the next step."""
        turn = self._turn
        self._turn = (turn + 1) % self.turns
        if self.turns == 1 or self._mark != mark_of(self.tensor):
            return self.seen, self.tensor
        low, high = turn * self.part, (turn + 1) * self.part
        return self.seen[low * self.columns : high * self.columns], self.tensor[low:high]

    def changed(self) -> bool:
        """Whether it is no longer what it was."""
        known, now = self._next_part()
        found = self.project(now)
        if (found == known).all():
            return False
        with np.errstate(all="ignore"):
            size = self.size**2
            if not math.isfinite(size):
                # It has diverged; its sums overflow now so, now so. What is seen is its coming back
                return math.isfinite(norm_of(self.project(self.tensor)))
            if not math.isfinite(norm_of(found)):
                return size < FAR * FAR
            # The same product over fewer rows may round otherwise. The entries of R are about 1, so what was seen tells the size of
            # the weight: of all rows, since a single one may cancel
            rest = found - known
            if float(rest @ rest) <= self.slack * self.slack * size:
                return False
        return not np.array_equal(found, known, equal_nan=True)

    # Backward passes

    def share(self, task: int) -> PassShare:
        """The share of a graph task. If it is not there yet, there was no gradient when the pass began (else see `begin`)."""
        for share in reversed(self.shares):
            if share.task == task:
                return share
        del self.shares[:-THROWN]  # thrown away, as it seems; gradients put aside may still come back
        return self._new_share(None, task)

    def begin(self, task: int) -> None:
        """The first that is known of a graph task: look at the gradient, if there is one.

        Nothing has been added to it yet if an error signal arrives; if the pass went past its module, all has, and no slots tell what.
        """
        gradient = self.tensor.grad
        if gradient is not None and not any(share.task == task for share in self.shares):
            self._new_share(self.project(gradient), task)

    def _new_share(self, before: Projected | None, task: int) -> PassShare:
        share = PassShare(before, np.zeros(self.rows * self.columns), 0.0, task=task)
        self.shares.append(share)
        return share

    def forget_until(self, task: int) -> None:
        """Forget backward passes up to this one."""
        self.shares = [share for share in self.shares if share.task > task]

    def hidden_part(self, gradient: Tensor, projected: Projected) -> float:
        """How many times as large a gradient is as what R shows of it; at least 1.

        A gradient whose rows are nearly parallel may lie nearly across R: little is seen of it, but all of its rounding.
        """
        shown = norm_of(projected) / math.sqrt(self.columns)
        size = norm_of_tensor(gradient.detach())
        return max(1.0, size / shown) if shown > 0 and math.isfinite(size) else 1.0

    def bound_coarse_error(self, share: PassShare, hidden: float) -> float:
        """Write down how far rounding to 16 bits may have moved a pass's gradient; gives that type's unit roundoff.

        hidden: how many times as large the gradient is as what R shows of it (see `hidden_part`).
        """
        assert share.coarse_dtype is not None
        seen = self.tensor.numel() * self.columns
        size = hidden * norm_of(share.added)
        share.coarse = audit.coarse_error(size, seen, share.coarse_dtype, share.partial_sums)
        if share.rounded_inside:
            share.common = audit.coarse_error_of_terms(share.scale, share.coarse_dtype)
            share.coarse += share.common
        return torch.finfo(share.coarse_dtype).eps / 2

    def add(self, task: int, use: Use, keys: Keys, errors: Tensor, error_size: float, key_size: float) -> None:
        """Add what some slots say was added to the gradient, with a bound on the sum of its absolute terms.

        error_size, key_size: bounds on the norms of error signals and keys, or of their own absolute terms if they are sums. By
        Cauchy-Schwarz, the absolute terms of Σ error ⊗ key sum to at most their product.
        """
        share = self.share(task)
        own = share.added.reshape(self.rows, self.columns)
        if use.rows:
            low, high = use.rows
            own = own[low:high]
        used = select_columns(errors, use.errors)
        root_of_count = math.sqrt(len(errors))
        if use.role == "bias":
            added = used.sum(0).unsqueeze(1)
            share.scale += error_size * root_of_count  # each key is 1
        elif use.role == "scale":
            # Here a key is the product of both already, and what is summed
            added = keys.vectors().sum(0).unsqueeze(1)
            share.scale += key_size * root_of_count
        elif use.role == "weight":
            projected = keys.project(self.random_like(errors), use.keys, use.groups)
            if use.groups == 1:
                added = (projected.T @ used).T
            else:
                apart = in_groups(used, use.groups)
                added = torch.einsum("ngo,ngk->gok", apart, projected).reshape(own.shape)
            # A few keys may nearly cancel in R: then their rounding is larger than what is seen of them
            share.scale += error_size * max(norm_of_tensor(projected), key_size)
        else:
            projected = used @ self.random_like(errors)
            added = keys.outer(projected).T
            share.scale += max(norm_of_tensor(projected), error_size) * key_size
        own += added.cpu().numpy()
