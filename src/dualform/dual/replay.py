"""Optimizers whose coefficients are matrices: walked forwards for weights, backwards for coefficients.

Forwards, an update needs the gradient that the optimizer saw (for √v̂ and the like), and takes the masked one along. Backwards,
C_s of the last step comes first; the matrices of a stretch are kept in memory, and stretches are replayed from checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.dual.coefficients import Updates
from dualform.dual.gradients import Keep, Replayed
from dualform.dual.rows import Rows
from dualform.native.kernels import is_plain, kernels
from dualform.recursions import KINDS, Factor, Kind, Linear, Settings, adam_numbers, at_rest, may_blow_up, outer
from dualform.store.reader import Store

MATRIX_BYTES = 96 << 20
"""How much memory the matrices of a stretch may take, and the checkpoints of all stretches."""


@dataclass
class Moment:
    """A parameter and its optimizer state after some step, moving forwards."""

    weight: Tensor
    average: Tensor
    shared: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return sum(state.nbytes for state in (self.weight, self.average, *self.shared.values()))

    def copy(self) -> Moment:
        """Another one, to be moved on its own."""
        shared = {name: state.clone() for name, state in self.shared.items()}
        return Moment(self.weight.clone(), self.average.clone(), shared)


def starting_moment(gradients: Replayed) -> Moment:
    """The parameter of some updates as the snapshot has it where they begin."""
    updates = gradients.updates
    kind = KINDS[updates.kind]
    snapshot = gradients.store.snapshot(updates.begin)

    def read(name: str) -> Tensor:
        value = snapshot[name]
        if gradients.rows is not None:
            value = gradients.rows.of(value)
        return value.to(gradients.dtype, copy=True)

    def state(name: str | None, shape: Sequence[int]) -> Tensor:
        full_name = f"state.{updates.parameter}.{name}"
        return read(full_name) if full_name in snapshot else weight.new_zeros(shape)

    weight = read(f"model.{updates.parameter}")
    average = state(kind.average, weight.shape)
    shapes = kind.shared_shapes(tuple(weight.shape))
    shared = {name: state(name, shape) for name, shape in shapes.items()}
    return Moment(weight, average, shared)


def step_on(
    now: Moment,
    kind: Kind,
    settings: dict[str, float],
    gradient: Tensor,
    *,
    walk: bool = True,
    room: Tensor | None = None,
) -> Linear:
    """Do one update; gives it as a linear map. walk=False: only what updates share goes on, not the weight. room: memory for
    the map, which then is good until the next update."""
    sign, decay, _ = outer(settings)
    pushed = gradient if sign > 0 else -gradient
    if decay:
        pushed = pushed.add(now.weight, alpha=decay)
    linear = kind.linear(settings, now.shared, pushed, room)
    linear = at_rest(linear, kind, settings, now.shared, (now.weight, now.average), gradient)
    if walk:
        linear.apply(now.weight, now.average, gradient)
    return linear


def _fits_the_loop(settings: Settings) -> bool:
    """Return whether the compiled loop knows these settings of Adam."""
    sign, _, _ = outer(settings)
    return sign > 0 and not may_blow_up(settings) and not settings["amsgrad"] and settings["beta1"] > 0.5


def _adam_in_one_pass(kind: Kind, settings: Settings, now: Moment, full: Tensor, kept: Tensor) -> bool:
    """Do one update of Adam or AdamW in place, in a compiled loop: in many passes over its matrices it takes longer than the gradient.

    full: the gradient that the optimizer saw. kept: the part of it that moves this weight. Returns False if nothing was done:
    the update is then to be done in the plain way (Kind.linear, Linear.apply).
    """
    loops = kernels()
    if loops is None or kind is not KINDS["adam"]:
        return False
    matrices = (full, kept, now.shared["exp_avg_sq"], now.average, now.weight)
    if not all(is_plain(matrix) and matrix.shape == now.weight.shape for matrix in matrices):
        return False
    if not _fits_the_loop(settings):
        return False
    _, _, shrink = outer(settings)
    beta2 = settings["beta2"]
    of_average = 1 - settings["beta1"]
    addresses = [matrix.data_ptr() for matrix in matrices]
    loops.adam(
        now.weight.numel(),
        beta2,
        1 - beta2,
        of_average,
        shrink,
        *adam_numbers(settings),
        *addresses,
    )
    return True


def forward(
    store: Store,
    updates: Updates,
    keep: Keep | None = None,
    *,
    only_masked: bool = False,
    first: Moment | None = None,
) -> tuple[Moment, Moment]:
    """The parameter at the end of the updates, from the snapshot where they begin: as it was trained, and what the slots that
    take part make of it (without a mask the same).

    only_masked: the first is not asked for, so it is replayed only where an update depends on it (decay makes the weight a part of
    its gradient). first: the moment where they begin, which moves on, instead of a snapshot.
    """
    gradients = Replayed(store, updates, keep=keep)
    kind = KINDS[updates.kind]
    trained = first or starting_moment(gradients)
    if keep is None:
        _walk(gradients, kind, trained)
        return trained, trained
    masked = Moment(trained.weight.clone(), trained.average.clone(), trained.shared)
    _walk_masked(gradients, kind, trained, masked, only_masked)
    return trained, masked


def _walk(gradients: Replayed, kind: Kind, now: Moment) -> None:
    """Do all updates."""
    total = gradients.sum()
    room = torch.empty_like(now.weight)
    for place, settings in enumerate(gradients.updates.each()):
        gradient = gradients(gradients.read(place), total)
        if not _adam_in_one_pass(kind, settings, now, gradient, gradient):
            step_on(now, kind, settings, gradient, room=room)


def _walk_masked(gradients: Replayed, kind: Kind, trained: Moment, masked: Moment, only_masked: bool) -> None:
    """Do all updates of the trained weight, if it is needed, and of the one beside it."""
    full_sum = gradients.sum()
    kept_sum = gradients.sum()
    room = torch.empty_like(trained.weight)
    moves_trained = not only_masked or any(map(may_blow_up, gradients.updates.each()))
    for place, settings in enumerate(gradients.updates.each()):
        step = gradients.read(place)
        full = gradients(step, full_sum)
        kept = full if step.keeps_all else gradients.kept(step, kept_sum)
        if not moves_trained and _adam_in_one_pass(kind, settings, masked, full, kept):
            continue
        linear = step_on(trained, kind, settings, full, walk=moves_trained, room=room)
        linear.apply(masked.weight, masked.average, kept)


class Backward:
    """The coefficient matrices of a parameter, from the last step to the first. Afterwards p and q are those of the beginning:
    X_T = p·W_0 + q·m_0 − Σ_s C_s ⊙ gradient_s.

    What an update made of a tiny weight that has only decay for a gradient is up to lr / |weight| times that weight: p may leave the
    range of float32. wide=True keeps p, q and C_s in float64.
    """

    def __init__(self, store: Store, updates: Updates, rows: Rows | None = None, *, wide: bool = False):
        self._updates = updates
        self._kind = KINDS[updates.kind]
        self._gradients = Replayed(store, updates, rows)
        self._sum = self._gradients.sum()
        self._first = starting_moment(self._gradients)
        dtype = torch.float64 if wide else self._gradients.dtype
        self.p: Factor = torch.ones_like(self._first.weight, dtype=dtype)
        self.q: Factor = torch.zeros_like(self._first.weight, dtype=dtype)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """(place of the update, C_s)."""
        return self._stretch(0, len(self._updates.steps), self._first.copy())

    @property
    def initial(self) -> Tensor:
        """The initial part, after the walk."""
        of_weight = self._first.weight * self.p
        of_average = self._first.average * self.q
        return (of_weight + of_average).double()

    def _stretch(self, low: int, high: int, now: Moment) -> Iterator[tuple[int, Tensor]]:
        """Walk back over the updates from low to high. now: the moment at low, which moves on."""
        count = high - low
        if 2 * count * now.weight.nbytes <= MATRIX_BYTES or count <= 4:
            yield from self._short_stretch(low, high, now)
            return
        # Too long for memory: only the beginnings of its parts are kept, and each part is replayed from there
        parts = int(max(2, min(count // 2, MATRIX_BYTES // max(now.nbytes, 1))))
        length = -(-count // parts)
        starts = range(low, high, length)
        checkpoints = self._checkpoints(starts, now)
        for start in reversed(starts):
            yield from self._stretch(start, min(start + length, high), checkpoints.pop())

    def _short_stretch(self, low: int, high: int, now: Moment) -> Iterator[tuple[int, Tensor]]:
        linears = [self._step_on(now, place) for place in range(low, high)]
        for place in reversed(range(low, high)):
            coefficient, self.p, self.q = linears.pop().back(self.p, self.q)
            if not isinstance(coefficient, Tensor):
                coefficient = torch.full_like(now.weight, coefficient)
            yield place, coefficient

    def _checkpoints(self, starts: range, now: Moment) -> list[Moment]:
        """Return the moments at the starts."""
        checkpoints = [now.copy()]
        for place in range(starts[0], starts[-1]):
            self._step_on(now, place)
            if place + 1 in starts:
                checkpoints.append(now.copy())
        return checkpoints

    def _step_on(self, now: Moment, place: int) -> Linear:
        gradient = self._gradients(self._gradients.read(place), self._sum)
        return step_on(now, self._kind, self._updates.at(place), gradient)
