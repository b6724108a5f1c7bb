"""Autocast as it was when a module ran, for what is computed once more in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """Whether autocast was on, and to which type it casts."""

    device: str
    dtype: torch.dtype
    is_on: bool

    @classmethod
    def now(cls, device: str) -> Autocast:
        """As it is now, for this type of device."""
        return cls(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def again(self) -> torch.autocast:
        """A context in which it is as it was. Nothing is cached: weights may change between forward and backward pass."""
        return torch.autocast(self.device, self.dtype, enabled=self.is_on, cache_enabled=False)
