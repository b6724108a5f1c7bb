"""Watch the system calls of this process below a folder, and interfere with one of them (see system_calls.c)."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("system_calls.c")

KINDS = ("none", "open", "create", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "truncate", "mark")
"""The kinds of watched calls, by their number in the C code."""

KILL_BEFORE, KILL_AFTER, KILL_INSIDE, FAIL, SHORT = range(1, 6)


class _Control(ctypes.Structure):
    """`struct control` of the C code."""

    _fields_ = [
        ("calls", ctypes.c_int64),
        ("act_at", ctypes.c_int64),
        ("action", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("persistent", ctypes.c_int64),
        ("acted", ctypes.c_int64),
        ("path", ctypes.c_char * 512),
    ]


class Interference:
    """What happens to the n-th watched call of a forked child; afterwards, what happened.

    It lives in memory that parent and child share: create it before the fork.
    """

    def __init__(self, call: int = 0, action: int = 0, *, error: int = 0, persistent: bool = False):
        """call: the number of the call, from 1 on; 0 only counts. error: the errno of FAIL and of persistent failures."""
        self._memory = mmap.mmap(-1, ctypes.sizeof(_Control))
        self._control = _Control.from_buffer(self._memory)
        self._control.act_at = call
        self._control.action = action
        self._control.error = error
        self._control.persistent = persistent

    def begin(self, folder: Path, trace: int = -1) -> None:
        """Watch everything below a folder from now on, in this process. trace: a descriptor to write all calls to."""
        global _active
        _active = self  # the library writes to its memory as long as the process runs
        library().watch_calls(os.fsencode(folder), ctypes.byref(self._control), trace)

    def stop(self) -> None:
        """Let all later calls through."""
        self._control.act_at = 0

    @property
    def error(self) -> int:
        """The errno of failures."""
        return int(self._control.error)

    @property
    def calls(self) -> int:
        """How many watched calls there have been."""
        return int(self._control.calls)

    @property
    def kind(self) -> str:
        """The kind of the call that was interfered with; "none" if it never came."""
        return KINDS[self._control.acted]

    @property
    def path(self) -> str:
        """The path of that call."""
        return os.fsdecode(self._control.path)


_active: Interference | None = None


def library() -> ctypes.CDLL:
    """The preloaded library."""
    found = ctypes.CDLL(None)
    found.watch_calls.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int]
    found.watch_calls.restype = None
    found.mark_trace.argtypes = [ctypes.c_int64]
    found.mark_trace.restype = None
    return found


def preload() -> None:
    """Start this program again with the library in front of the C library's calls, unless that has been done."""
    target = Path(tempfile.gettempdir()) / f"dualform-system-calls-{os.getuid()}-{_digest()}.so"
    if str(target) in os.environ.get("LD_PRELOAD", ""):
        return
    if not target.exists():
        compiler = os.environ.get("CC") or shutil.which("cc")
        if compiler is None:
            sys.exit("this campaign needs a C compiler: set CC, or install one")
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / target.name
            command = [*compiler.split(), "-O1", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl", "-pthread"]
            subprocess.run(command, check=True)
            shutil.move(made, target)
    os.environ["LD_PRELOAD"] = str(target)
    os.execv(sys.executable, [sys.executable, *sys.argv])


def _digest() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
