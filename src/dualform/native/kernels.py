"""Loads the loops in C. Everything works without them, and gives the same to rounding."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

from dualform.native.compile import library

COUNT, POINTER = ctypes.c_int64, ctypes.c_void_p
ARGUMENTS = {"slots": [COUNT] * 4 + [POINTER] * 9}
"""Of each function in kernels.c."""


@lru_cache(maxsize=1)
def kernels() -> ctypes.CDLL | None:
    """The compiled loops; None where they were not compiled, or DUALFORM_NATIVE=0 asks for none."""
    if os.environ.get("DUALFORM_NATIVE") == "0":
        return None
    try:
        loaded = ctypes.CDLL(str(library()))
    except OSError:
        return None
    for name, arguments in ARGUMENTS.items():
        getattr(loaded, name).argtypes = arguments
    return loaded
