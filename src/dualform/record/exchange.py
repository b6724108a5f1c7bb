"""What ranks tell each other before an update, in one sum over all of them: by that, each audits the gradient that all of them have made.

After a backward pass of DistributedDataParallel, `.grad` is the mean over the ranks of what their slots add up to. So the audit compares sums
over the ranks: those of what the slots say through R, and those of the gradients through R. Every rank has the same sums and so comes to
the same verdict: either all of them go on, or all raise an error.

Slots, chunks and snapshots stay with their rank. Chunks should end at the same steps on all ranks, so the ranks also tell each other
when they would like to seal one, or to store a snapshot; what one of them wants, all do.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dualform.errors import RecordingError, UnexplainedError
from dualform.projection import Projected
from dualform.record.edits import OptimizerWatch
from dualform.record.parameters import PassShare, RecordedParameter
from dualform.record.ranks import Ranks

if TYPE_CHECKING:
    from dualform.record.gradients import ExplainedGradient

SEAL_SECONDS = 15.0
"""After this time ranks seal a chunk together: before one of them does so on its own."""
SAME = 1e-12
"""Squares of what all ranks have alike differ by less than this part of themselves."""
FAILED, PASSES, SQUARED_PASSES, SEAL, SNAPSHOT, HEADER = range(6)
"""The first numbers that are summed: how many ranks have failed; how many backward passes there were, and the squares of these numbers;
how many ranks want to seal a chunk, or to store a snapshot."""
HAS_GRADIENT, SQUARE, FINGERPRINT, SQUARED_FINGERPRINT, SQUARED_SIZE, OF_GRADIENT = range(6)
"""Then for each parameter: how many ranks have a gradient, and its square; the fingerprint of the weight, its square, and the weight's size.
The gradient itself follows."""
HAS_SHARE, HAS_BEFORE, SCALE, COARSE, COMMON, OF_SHARE = range(6)
"""Then for each backward pass: how many ranks it has reached the parameter on, and on how many there was a gradient before; the bounds of
audit.Share. What was in the gradient before follows, and what was added."""


class Exchange:
    """The sums over ranks of one recording."""

    def __init__(self, ranks: Ranks, chunk_bytes: int):
        self.ranks = ranks
        self.wants_snapshot: Callable[[], bool] = lambda: False
        """Whether this rank has stored enough slots for a snapshot."""
        self.stores_snapshot = False
        """Whether all ranks store a snapshot after the step that is under way, …"""
        self.seals = False
        """… and whether they seal a chunk."""
        self._chunk_bytes = chunk_bytes
        self._passes: dict[OptimizerWatch, int] = {}
        """How many backward passes the last update of an optimizer had, on all ranks."""
        self._has_met = False
        """Whether the ranks have exchanged anything for the update that is under way."""
        self._unsealed_bytes = 0
        self._sealed_at = time.monotonic()

    # Failures

    @contextlib.contextmanager
    def attempt(self, watch: OptimizerWatch) -> Iterator[None]:
        """Prepare an update; tell the other ranks if that fails before they have met, for they would wait for this one."""
        self._has_met = False
        try:
            self.ranks.refuse_unsupported()
            yield
        except Exception:
            if not self._has_met:
                layout = _Layout(watch.recorded, self._passes.get(watch, 1))
                numbers = np.zeros(layout.size)
                numbers[FAILED] = 1
                self.ranks.sum(numbers)
            raise

    # When to seal

    def has_put(self, nbytes: int) -> bool:
        """A step was handed to the writer; returns whether all ranks now seal a chunk."""
        self._unsealed_bytes += nbytes
        if not self.seals:
            return False
        self._unsealed_bytes = 0
        self._sealed_at = time.monotonic()
        return True

    def _wants_to_seal(self) -> bool:
        is_late = time.monotonic() - self._sealed_at > SEAL_SECONDS
        return is_late or 2 * self._unsealed_bytes >= self._chunk_bytes

    # Gradients

    def sum_over_ranks(self, watch: OptimizerWatch, gradients: Sequence[ExplainedGradient]) -> None:
        """Put the sums over all ranks in the place of projections and shares of this rank's gradients."""
        tasks = sorted({share.task for gradient in gradients for share in gradient.shares})
        summed = self._summed(watch, gradients, tasks)
        layout = _Layout(watch.recorded, len(tasks))
        by_parameter = {gradient.parameter: gradient for gradient in gradients}
        for number, parameter in enumerate(watch.recorded):
            numbers = layout.of_parameter(summed, number)
            self._refuse_differences(parameter, numbers)
            gradient = by_parameter.get(parameter)
            if gradient is not None:
                self._take(gradient, tasks, layout, numbers)

    def _summed(self, watch: OptimizerWatch, gradients: Sequence[ExplainedGradient], tasks: Sequence[int]) -> Projected:
        """Return the sums of everything, once all ranks know how many backward passes there were."""
        expected = self._passes.setdefault(watch, 1)
        summed = self._sum_of(watch, gradients, tasks, expected)
        passes = self._agreed_passes(summed)
        if passes == expected:
            return summed
        # As when the training begins: most updates have as many passes as the one before
        self._passes[watch] = passes
        return self._sum_of(watch, gradients, tasks, passes)

    def _sum_of(
        self, watch: OptimizerWatch, gradients: Sequence[ExplainedGradient], tasks: Sequence[int], passes: int
    ) -> Projected:
        layout = _Layout(watch.recorded, passes)
        numbers = np.zeros(layout.size)
        numbers[PASSES] = len(tasks)
        numbers[SQUARED_PASSES] = len(tasks) ** 2
        numbers[SEAL] = self._wants_to_seal()
        numbers[SNAPSHOT] = self.wants_snapshot()
        if len(tasks) == passes:
            layout.fill(numbers, gradients, tasks)
        self._has_met = True
        with np.errstate(all="ignore"):
            summed = self.ranks.sum(numbers)
        self.seals = bool(summed[SEAL])
        self.stores_snapshot = bool(summed[SNAPSHOT])
        return summed

    def _agreed_passes(self, summed: Projected) -> int:
        if summed[FAILED]:
            raise RecordingError(
                "another rank could not record this update, so no rank does: its own error says why. The recording ends with the last "
                "step that all ranks have sealed."
            )
        ranks = self.ranks.size
        if summed[SQUARED_PASSES] * ranks != summed[PASSES] ** 2:
            raise RecordingError(
                "the ranks have made different numbers of backward passes before this update, so their slots cannot be put together. Give "
                "each rank the same number of micro-batches."
            )
        return int(summed[PASSES]) // ranks

    def _refuse_differences(self, parameter: RecordedParameter, numbers: Projected) -> None:
        """Raise an error unless all ranks have the same gradient of a parameter, and the same weight. numbers: sums over ranks."""
        ranks = self.ranks.size
        with_gradient = int(numbers[HAS_GRADIENT])
        if with_gradient not in (0, ranks):
            raise UnexplainedError(
                f"{parameter.name!r} has a gradient on {with_gradient} of {ranks} ranks only. {NOT_AVERAGED}"
            )
        rounding = (parameter.slack**2 + SAME) * float(numbers[SQUARED_SIZE])
        if _spread(float(numbers[FINGERPRINT]), float(numbers[SQUARED_FINGERPRINT]), ranks) > rounding:
            raise UnexplainedError(
                f"{parameter.name!r} is not the same weight on all ranks, so a step of one is not a step of the others. Give all ranks the "
                f"same weights (DistributedDataParallel does so when it is made), and the same optimizer."
            )
        gradient = numbers[OF_GRADIENT : OF_GRADIENT + parameter.rows * parameter.columns]
        with np.errstate(all="ignore"):
            square = float(gradient @ gradient)
        if _spread(math.sqrt(square), float(numbers[SQUARE]), ranks) > SAME * float(numbers[SQUARE]):
            raise UnexplainedError(f"{parameter.name!r} has another gradient on each rank. {NOT_AVERAGED}")

    def _take(self, gradient: ExplainedGradient, tasks: Sequence[int], layout: _Layout, numbers: Projected) -> None:
        """Put sums over ranks in the place of what this rank knows of a gradient."""
        width = gradient.parameter.rows * gradient.parameter.columns
        own = {share.task: share for share in gradient.shares}
        shares = []
        for place, task in enumerate(tasks):
            known = layout.of_share(numbers, width, place)
            reached = float(known[HAS_SHARE])
            if not reached:
                continue
            share = PassShare(None, known[OF_SHARE + width :], float(known[SCALE]), task=task, counted=True)
            if known[HAS_BEFORE]:
                # Where the pass has not reached the parameter, what was in its gradient is what was there on the other ranks
                share.before = known[OF_SHARE : OF_SHARE + width] * (self.ranks.size / float(known[HAS_BEFORE]))
            share.coarse = float(known[COARSE])
            share.common = float(known[COMMON])
            share.audited = task not in own or own[task].audited
            shares.append(share)
        gradient.shares = shares
        gradient.projected = numbers[OF_GRADIENT : OF_GRADIENT + width]
        gradient.ranks = self.ranks.size


NOT_AVERAGED = (
    "Gradients must be averaged over the ranks before optimizer.step(): call the DistributedDataParallel and not its module, and let the last "
    "backward pass before the step be outside of no_sync()"
)


def _spread(total: float, squares: float, ranks: int) -> float:
    """Σ (x − mean)² over ranks, from Σ x and Σ x²; 0 where they are not finite."""
    spread = squares - total * total / ranks
    return spread if math.isfinite(spread) else 0.0


class _Layout:
    """Where the numbers of each parameter lie in the one array that is summed."""

    def __init__(self, parameters: Sequence[RecordedParameter], passes: int):
        self._widths = [parameter.rows * parameter.columns for parameter in parameters]
        self._parameters = parameters
        self._begins = [HEADER]
        for width in self._widths:
            size = OF_GRADIENT + width + passes * (OF_SHARE + 2 * width)
            self._begins.append(self._begins[-1] + size)
        self.size = self._begins[-1]

    def of_parameter(self, numbers: Projected, place: int) -> Projected:
        """The numbers of one parameter, as a view."""
        return numbers[self._begins[place] : self._begins[place + 1]]

    def of_share(self, numbers: Projected, width: int, place: int) -> Projected:
        """The numbers of one backward pass among those of a parameter, as a view."""
        size = OF_SHARE + 2 * width
        begin = OF_GRADIENT + width + place * size
        return numbers[begin : begin + size]

    def fill(self, numbers: Projected, gradients: Sequence[ExplainedGradient], tasks: Sequence[int]) -> None:
        """Write down what this rank knows."""
        by_parameter = {gradient.parameter: gradient for gradient in gradients}
        for place, parameter in enumerate(self._parameters):
            own = self.of_parameter(numbers, place)
            own[FINGERPRINT] = parameter.fingerprint
            own[SQUARED_FINGERPRINT] = parameter.fingerprint**2
            own[SQUARED_SIZE] = parameter.size**2
            gradient = by_parameter.get(parameter)
            if gradient is None:
                continue
            width = self._widths[place]
            own[HAS_GRADIENT] = 1
            with np.errstate(all="ignore"):
                own[SQUARE] = gradient.projected @ gradient.projected
            own[OF_GRADIENT : OF_GRADIENT + width] = gradient.projected
            for share in gradient.shares:
                self._fill_share(self.of_share(own, width, tasks.index(share.task)), share, width)

    @staticmethod
    def _fill_share(own: Projected, share: PassShare, width: int) -> None:
        own[HAS_SHARE] = 1
        own[SCALE] = share.scale
        own[COARSE] = share.coarse
        own[COMMON] = share.common
        if share.before is not None:
            own[HAS_BEFORE] = 1
            own[OF_SHARE : OF_SHARE + width] = share.before
        own[OF_SHARE + width :] = share.added
