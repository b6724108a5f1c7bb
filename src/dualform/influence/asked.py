"""What was asked, in one segment: the queries and slopes of every linear map at the segment's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dualform.influence.pairings import Pairing, pairings
from dualform.layers.keys import Vectors
from dualform.layers.streams import Layer


@dataclass(frozen=True)
class Asked:
    """Of one linear map: queries (examples, positions, groups, width), of one-hot keys (examples, positions); slopes (examples,
    positions, groups, outputs)."""

    pairing: Pairing
    queries: Tensor
    slopes: Tensor


ByLayer = Mapping[str, list[Asked]]


def asked(layer: Layer, queries: Tensor, slopes: Tensor) -> list[Asked]:
    """queries (examples, positions, d_in or 1), slopes (examples, positions, d_out)."""
    lead = queries.shape[:2]
    if layer.outputs:
        slopes = slopes[..., list(layer.outputs)]
    keys, along = Vectors(queries.flatten(0, 1)), slopes.flatten(0, 1)
    found = []
    for pairing in pairings(layer):
        apart = pairing.error_side(keys, along)
        own = queries.reshape(lead).long() if pairing.numbers else _apart(pairing.key_side(keys), lead)
        found.append(Asked(pairing, own, _apart(apart, lead)))
    return found


def _apart(flat: Tensor, lead: tuple[int, ...]) -> Tensor:
    return flat.reshape(*lead, *flat.shape[1:])
