"""How a sample is shown: as a picture, a text, or a row of numbers. Plain data; nothing here becomes HTML."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from dualform.errors import QuestionError
from dualform.explorer.forms import Shown

Show = Callable[[Any], Any]
SIDE = 64
"""Pictures are made smaller by whole factors until neither side is longer than this many pixels times two."""
NUMBERS = 256
"""So many numbers of a vector are shown."""
LETTERS = 2000
"""So many characters of a text are shown."""
SMALLEST_SQUARE = 49
"""A flat vector with the length of a square of at least this size is taken for a picture."""


def shown(sample: Any, show: Show | str | None = None, *, ink: bool = False) -> Shown:
    """One sample as plain data. show: the user's function, or "image" | "vector" | "text", or None: a guess by shape.

    ink: grey values are ink on paper, so that pages turn them around in dark colours.
    """
    found = show(sample) if callable(show) else sample
    if isinstance(found, str):
        return Shown(kind="text", text=found[:LETTERS])
    array = found.detach().cpu().numpy() if isinstance(found, Tensor) else np.asarray(found)
    if array.dtype.kind not in "biuf":
        return Shown(kind="text", text=str(found)[:LETTERS])
    kind = show if isinstance(show, str) else None
    if kind not in (None, "image", "vector", "text"):
        raise QuestionError(f'show={show!r}: expected "image", "vector", "text" or a function of a sample.')
    picture = None if kind in ("vector", "text") else _picture(array, certain=kind == "image" or callable(show))
    if picture is not None:
        small = _smaller(picture)
        grey = 255 - small if ink and small.ndim == 2 else small
        return Shown(kind="image", source=data_address(grey), width=small.shape[1], height=small.shape[0], ink=ink)
    if kind == "text":
        return Shown(kind="text", text=str(array.tolist())[:LETTERS])
    flat = array.reshape(-1)[:NUMBERS].astype(np.float64)
    return Shown(kind="vector", numbers=[float(f"{x:.4g}") if math.isfinite(x) else 0.0 for x in flat.tolist()])


def _picture(array: np.ndarray[Any, Any], *, certain: bool) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """(h, w) or (h, w, 3) from 0 to 255, if an array looks like a picture."""
    if array.ndim == 1:
        side = math.isqrt(array.size)
        if side * side != array.size or (array.size < SMALLEST_SQUARE and not certain):
            return None
        array = array.reshape(side, side)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or not array.size:
        return None
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array, np.uint8)
    values: np.ndarray[Any, np.dtype[np.float64]] = np.nan_to_num(array.astype(np.float64))
    low, high = values.min(), values.max()
    scaled: np.ndarray[Any, np.dtype[np.float64]] = (values - low) * (255 / (high - low) if high > low else 0)
    return scaled.round().astype(np.uint8)


def _smaller(picture: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    factor = math.ceil(max(picture.shape[:2]) / (2 * SIDE))
    return picture[::factor, ::factor]


def data_address(picture: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """A picture, (h, w) or (h, w, 3), as a PNG in a data: address."""
    height, width = picture.shape[:2]
    lines = picture.reshape(height, -1)
    raw = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1).tobytes()  # 0: no filter
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if picture.ndim == 2 else 2, 0, 0, 0)
    body = b"".join(_part(*part) for part in ((b"IHDR", head), (b"IDAT", zlib.compress(raw, 6)), (b"IEND", b"")))
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def _part(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
