"""Loads the loops in C. Everything works without them, and gives the same results up to rounding."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch  # before the library, which finds PyTorch's threads when it is loaded
from torch import Tensor

from dualform.native.compile import library

COUNT = ctypes.c_int64
NUMBER = ctypes.c_float
POINTER = ctypes.c_void_p
FUNCTIONS: dict[str, tuple[Callable[[str], ctypes.CDLL], list[Any], Any]] = {
    "halves": (ctypes.PyDLL, [COUNT] * 2 + [POINTER] * 3 + [COUNT], None),
    "adam": (ctypes.CDLL, [COUNT] + [NUMBER] * 6 + [POINTER] * 5, None),
    "picked": (ctypes.CDLL, [COUNT] * 5 + [POINTER] * 6 + [COUNT], ctypes.c_int),
    "highest": (ctypes.CDLL, [COUNT] * 3 + [POINTER] * 5 + [COUNT], None),
}
"""The arguments and the result of each function in C. PyDLL keeps Python's lock: the function is too short to hand it to another thread,
which would keep it. CDLL releases the lock."""


@lru_cache(maxsize=1)
def kernels() -> Any:
    """Return the compiled loops; None if they are not compiled, or DUALFORM_NATIVE=0 turns them off."""
    if os.environ.get("DUALFORM_NATIVE") == "0":
        return None
    path = str(library())
    loops = SimpleNamespace()
    for name, (kind, arguments, result) in FUNCTIONS.items():
        try:
            function = getattr(kind(path), name)
        except OSError:
            return None
        function.argtypes = arguments
        function.restype = result
        setattr(loops, name, function)
    return loops


def is_plain(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a loop can read a tensor: contiguous numbers of this type, in the memory of the CPU."""
    return tensor.dtype is dtype and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
