"""16-bit types that this machine can multiply. Some processors stop at bfloat16 products with an illegal instruction."""

import functools
import subprocess
import sys

import pytest
import torch

PROBE = """
import torch
from torch import nn

dtype = getattr(torch, "{name}")
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 32), nn.ReLU(), nn.Linear(32, 8))
with torch.autocast("cpu", dtype=dtype):
    out = model(torch.randn(16, 1, 8, 8))
out.float().sum().backward()
"""


@functools.cache
def can_multiply(name: str) -> bool:
    """Whether products of this type run here; asked in a process of its own, since it may be killed."""
    return subprocess.run([sys.executable, "-c", PROBE.format(name=name)], capture_output=True).returncode == 0


def require(dtype: torch.dtype) -> None:
    """Skip the test where this machine cannot multiply a type."""
    name = str(dtype).removeprefix("torch.")
    if dtype in (torch.float16, torch.bfloat16) and not can_multiply(name):
        pytest.skip(f"this processor cannot multiply {name}")


def scale_gradients(accelerator, **settings):
    """Let Accelerate train in float16 as it does on a GPU; on a CPU it leaves out autocast and scaler. settings: of the scaler."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", **settings)
