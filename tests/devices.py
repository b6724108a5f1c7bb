"""The devices that tests run on: those of this machine, or a fake one, which finds code that takes every tensor for one of the CPU.

The fake one (fake_device/device.cpp) is a device for the whole process, so tests on it run in a process of their own, which
DUALFORM_FAKE_DEVICE tells where the compiled library is.
"""

import os
import subprocess
from pathlib import Path

import torch

LIBRARY = "DUALFORM_FAKE_DEVICE"
FLOAT64 = "DUALFORM_FAKE_FLOAT64"
WRITTEN_FOR = "2.13"
"""The version of PyTorch whose headers the fake device is compiled with."""
SOURCE = Path(__file__).parent / "fake_device" / "device.cpp"
MAY_BE_THERE = {"cpu": lambda: True, "cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}


def names():
    """The types of the devices that tests run on."""
    library = os.environ.get(LIBRARY)
    if library is not None:
        _use_fake_device(library)
        return ["fake"]
    return [name for name, is_there in MAY_BE_THERE.items() if is_there()]


def compile_fake_device(library, compiler):
    """Compile the fake device."""
    folder = Path(torch.__file__).parent
    include = folder / "include"
    headers = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    options = ["-O0", "-std=c++20", "-shared", "-fPIC", "-w"]
    libraries = [f"-L{folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [compiler, *options, *headers, str(SOURCE), "-o", str(library), *libraries]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _use_fake_device(library):
    from torch.utils import backend_registration

    if torch._C._get_privateuse1_backend_name() == "fake":
        return

    class FakeBackend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16, torch.float16]

        def get_rng_state(self, device=None):
            return torch.empty(0, dtype=torch.uint8)

        def set_rng_state(self, state, device=None):
            pass

    torch.ops.load_library(library)
    backend_registration._setup_privateuseone_for_python_backend("fake", backend_module=FakeBackend())
