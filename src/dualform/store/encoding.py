"""How vectors are stored: in float64, float32 or bfloat16, or in float16 with a power of two per vector.

NumPy has no bfloat16, so such numbers are stored as their bits, in int16.

Unscaled, most error signals would fall below float16's normal range. Scaled, each element keeps 11 significant bits
unless it is 2²⁹ times smaller than the norm of its vector.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Ints
from dualform.native.halves import scaled_halves
from dualform.store.format import DTYPES

if TYPE_CHECKING:
    from dualform.store.memory import Pool, Slab

TORCH: dict[str, torch.dtype] = {name: getattr(torch, stored) for name, stored in DTYPES.items()}
"""The types in which vectors are stored, by the names that users give to dtype=."""
SCALED_EXPONENT = 15
"""Scaled vectors have norms in [2¹⁴, 2¹⁵), so that no element overflows float16."""
UNSCALED = 126 + SCALED_EXPONENT
"""The exponent of such a norm in the bits of a float32: the vector is stored unscaled."""
SMALLEST_POWER = -100
LARGEST_POWER = 127
"""The powers of two that float32 can hold."""


@dataclass(slots=True)
class Encoded:
    """Vectors (n, d) as stored; `exponents` (n,) int16 says by which power of two each was divided."""

    data: Tensor
    exponents: Tensor | None
    slab: Slab | None = None
    """The pool's memory that `data` is a part of, if any."""
    first: int = 0
    """The first row of `data` in the slab."""
    count: int = field(init=False)
    """How many vectors there are."""
    nbytes: int = field(init=False)
    """How many bytes are stored."""

    def __post_init__(self) -> None:
        self.count = self.data.size(0)
        self.nbytes = self.data.nbytes
        if self.exponents is not None:
            self.nbytes += self.exponents.nbytes

    def scales(self, places: slice | Tensor) -> Tensor | None:
        """Return the exponents of some of the vectors."""
        return None if self.exponents is None else self.exponents[places]

    def first_vectors(self, count: int) -> Encoded:
        """Return the first vectors, as a view."""
        return Encoded(self.data[:count], self.scales(slice(0, count)))

    def some(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode some of the vectors, given by their places."""
        return decode(self.data.index_select(0, places), self.scales(places), dtype)

    def take(self, places: Ints) -> Encoded:
        """Copy some of the vectors.

        With NumPy: PyTorch would start further OpenMP threads for the writer's thread. With more of these than cores, the threads of
        the training sleep at each barrier instead of spinning.
        """
        exponents = None if self.exponents is None else torch.from_numpy(self.exponents.numpy()[places])
        return Encoded(torch.from_numpy(self.data.numpy()[places]), exponents)


@dataclass(slots=True)
class EncodeRequest:
    """Vectors (n, d) to be stored."""

    vectors: Tensor
    name: str = ""
    """What the memory is for: see Pool."""
    norms: Tensor | None = None
    """Their Euclidean norms (n,), if known already."""
    as_they_are: bool = False
    """For keys: do not scale vectors whose norm is from 1 to 2¹⁵. An element is then off by at most 2⁻¹¹ of itself or 2⁻²⁵, whichever
    is larger."""
    source: Hashable | None = None
    """Requests with the same source have the same vectors, which are stored once. None: unknown."""


def encode(
    vectors: Tensor, dtype: str, pool: Pool | None = None, name: str = "", *, as_they_are: bool = False
) -> Encoded:
    """Copy vectors (n, d) into their stored form; the copy shares no memory with the original."""
    request = EncodeRequest(vectors.detach().cpu(), name, as_they_are=as_they_are)
    return encode_all([request], dtype, pool)[0]


def encode_all(requests: Sequence[EncodeRequest], dtype: str, pool: Pool | None = None) -> list[Encoded]:
    """Encode several at once, which takes little longer than one: each has few numbers."""
    first_of: dict[Hashable, int] = {}
    distinct: list[EncodeRequest] = []
    places: list[int] = []
    for request in requests:
        place = len(distinct)
        if request.source is not None:
            place = first_of.setdefault(request.source, place)
        if place == len(distinct):
            distinct.append(request)
        places.append(place)
    encoded = _encode_distinct(distinct, dtype, pool)
    used_places: set[int] = set()
    encoded_requests: list[Encoded] = []
    for place in places:
        vectors = encoded[place]
        if place in used_places and pool is not None:
            vectors = pool.share(vectors)
        used_places.add(place)
        encoded_requests.append(vectors)
    return encoded_requests


def _encode_distinct(requests: Sequence[EncodeRequest], dtype: str, pool: Pool | None) -> list[Encoded]:
    for request in requests:
        _to_cpu_floats(request, scaled=dtype == "float16")
    targets = [_target(request, TORCH[dtype], pool) for request in requests]
    if dtype == "float16" and requests:
        _copy_scaled(requests, targets)
        return targets
    for request, target in zip(requests, targets, strict=True):
        vectors = request.vectors
        if dtype == "bfloat16":
            vectors = vectors.to(torch.bfloat16).view(torch.int16)
        target.data.copy_(vectors)
    return targets


def _to_cpu_floats(request: EncodeRequest, *, scaled: bool) -> None:
    """Copy vectors to the host and, to be scaled, to float32. Norms that were computed in another type are dropped as not exact enough."""
    is_float = request.vectors.dtype in (torch.float32, torch.float64)
    if request.vectors.is_cpu and (is_float or not scaled):
        return
    vectors = request.vectors.cpu()
    request.vectors = vectors.float() if scaled and not is_float else vectors
    request.norms = None


def _target(request: EncodeRequest, dtype: torch.dtype, pool: Pool | None) -> Encoded:
    """Return memory for encoded vectors, from a pool if there is one."""
    count, width = request.vectors.shape
    if pool is not None:
        return pool.take(request.name, count, width, dtype)
    exponents = torch.empty(count, dtype=torch.int16) if dtype is torch.float16 else None
    return Encoded(torch.empty(count, width, dtype=dtype), exponents)


def _copy_scaled(requests: Sequence[EncodeRequest], targets: Sequence[Encoded]) -> None:
    """Write each vector, divided by its power of two, as float16."""
    counts = [len(request.vectors) for request in requests]
    raised = _float32_exponents(requests, counts)
    factors = ((253 + SCALED_EXPONENT - raised) << 23).view(np.float32)[:, None]
    powers = np.subtract(raised, UNSCALED, dtype=np.int16, casting="unsafe")
    scales = torch.split(torch.from_numpy(factors), counts)
    exponents = torch.split(torch.from_numpy(powers), counts)
    start = 0
    for number, (request, target) in enumerate(zip(requests, targets, strict=True)):
        end = start + counts[number]
        vectors = request.vectors
        is_unscaled = request.as_they_are and bool(np.equal(raised[start:end], UNSCALED).all())
        if is_unscaled:
            target.data.copy_(vectors)
        elif not scaled_halves(vectors, scales[number], target.data):
            # In two steps, since PyTorch is slow to round a product to float16 while computing it
            target.data.copy_(vectors * scales[number])
        assert target.exponents is not None
        target.exponents.copy_(exponents[number])
        start = end


def _float32_exponents(requests: Sequence[EncodeRequest], counts: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the power of two of each vector, as it is in the bits of a float32; UNSCALED: the vector is stored unscaled."""
    # A norm is as good a bound as the largest element, and takes one pass over the data instead of two
    norms = [
        torch.linalg.vector_norm(request.vectors, dim=1) if request.norms is None else request.norms
        for request in requests
    ]
    bounds = torch.cat(norms).numpy()
    if bounds.size and not (np.minimum.reduce(bounds) > 1e-15 and np.maximum.reduce(bounds) < 1e15):
        # Squares may be out of float32's range, or something is not finite
        bounded = [_bounds(request.vectors, some) for request, some in zip(requests, norms, strict=True)]
        bounds = torch.cat(bounded).numpy()
    raised = bounds.astype(np.float32, copy=False).view(np.int32) >> 23
    may_stay = _repeated(tuple([request.as_they_are for request in requests]), *counts)
    raised[(raised >= 127) & (raised < 127 + SCALED_EXPONENT) & may_stay] = UNSCALED
    return raised


@lru_cache(maxsize=64)  # the same at every step
def _repeated(flags: tuple[bool, ...], *counts: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.repeat(np.array(flags, dtype=np.bool_), counts)


def _bounds(vectors: Tensor, norms: Tensor) -> Tensor:
    """Return norms; of vectors whose squares float32 cannot hold, the largest element instead."""
    if not vectors.numel():
        return torch.ones_like(norms)
    finite = vectors.abs().where(vectors.isfinite(), 0)
    largest = finite.amax(1).clamp(2.0**SMALLEST_POWER, 2.0**LARGEST_POWER)
    return norms.where((norms > 1e-15) & (norms < 1e15), largest)


def encode_numbers(numbers: Tensor) -> Encoded:
    """Copy one-hot keys, given by the place of their one, (n, 1)."""
    copied = numbers.detach().cpu().to(torch.int32, copy=True)
    return Encoded(copied.contiguous(), None)


def decode(data: Tensor, exponents: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return vectors in the given type; a view if they are stored in it."""
    if data.dtype is torch.int16:
        data = data.view(torch.bfloat16)
    decoded = data.to(dtype)
    if exponents is None or not bool(exponents.any()):
        return decoded
    powers = torch.exp2(exponents.to(dtype)).unsqueeze(1)
    # Not in place if nothing was converted, since that would change the stored vectors
    return decoded * powers if decoded is data else decoded.mul_(powers)
