"""An update of Adam or AdamW in one pass over its matrices, compiled: in many passes it takes longer than the gradient."""

from __future__ import annotations

from torch import Tensor

from dualform.native.kernels import is_plain, kernels
from dualform.recursions import KINDS, Kind, Settings, adam_numbers, may_blow_up, outer


def in_one_pass(
    kind: Kind,
    settings: Settings,
    shared: dict[str, Tensor],
    weight: Tensor,
    average: Tensor,
    full: Tensor,
    kept: Tensor,
) -> bool:
    """Go one step on, in place, with the gradient that the optimizer saw and the part of it that moves this weight.

    False: nothing was done, it is to be done in the plain way (Kind.linear, Linear.apply).
    """
    loops, (sign, _, shrink) = kernels(), outer(settings)
    if loops is None or kind is not KINDS["adam"]:
        return False
    matrices = full, kept, shared["exp_avg_sq"], average, weight
    plain = all(is_plain(one) and one.shape == weight.shape for one in matrices)
    if not plain or may_blow_up(settings) or sign < 0 or settings["amsgrad"] or settings["beta1"] <= 0.5:
        return False
    numbers = settings["beta2"], 1 - settings["beta2"], 1 - settings["beta1"], shrink, *adam_numbers(settings)
    loops.adam(weight.numel(), *numbers, *(one.data_ptr() for one in matrices))
    return True
