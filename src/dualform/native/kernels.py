"""Loads the loops in C. Everything works without them, and gives the same to rounding."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # before the library, which finds PyTorch's threads when it is loaded
from torch import Tensor

from dualform.native.compile import library

COUNT, NUMBER, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
FUNCTIONS: dict[str, tuple[Callable[[str], ctypes.CDLL], list[Any], Any]] = {
    "slots": (ctypes.PyDLL, [COUNT, POINTER, POINTER, COUNT], COUNT),
    "zero_rows": (ctypes.PyDLL, [COUNT] * 2 + [POINTER] * 2, COUNT),
    "adam": (ctypes.CDLL, [COUNT] + [NUMBER] * 6 + [POINTER] * 5, None),
    "picked": (ctypes.CDLL, [COUNT] * 5 + [POINTER] * 6 + [COUNT], ctypes.c_int),
    "highest": (ctypes.CDLL, [COUNT] * 3 + [POINTER] * 5 + [COUNT], None),
}
"""What each function in C takes and gives. PyDLL: it is too short to let go of Python's lock, which another thread would
take and keep; CDLL: others may run meanwhile."""


@lru_cache(maxsize=1)
def kernels() -> Any:
    """The compiled loops; None where they were not compiled, or DUALFORM_NATIVE=0 asks for none."""
    if os.environ.get("DUALFORM_NATIVE") == "0":
        return None
    path, found = str(library()), SimpleNamespace()
    for name, (kind, takes, gives) in FUNCTIONS.items():
        try:
            function = getattr(kind(path), name)
        except OSError:
            return None
        function.argtypes, function.restype = takes, gives
        setattr(found, name, function)
    return found


def is_plain(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a loop can walk over it: numbers of this type, one after the other, in the processor's memory."""
    return tensor.dtype is dtype and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()


def address(array: np.ndarray[Any, Any]) -> int:
    """Where an array begins in memory."""
    found: int = array.__array_interface__["data"][0]
    return found
