"""Compiles the C files beside it into one library. Run when dualform is installed; by hand: python -m dualform.native.compile

Nothing but the standard library: it runs where PyTorch is not installed yet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
# Never -ffast-math: it changes the processor's treatment of small numbers, for the training as well
# -fno-math-errno changes no results: square roots need not set errno, so that several are computed at once
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-shared", "-fPIC")


def library() -> Path:
    """Return the path of the compiled library. Its name is a hash of the sources, so that an older library is never used."""
    sources = [path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]"))]
    flags = " ".join(FLAGS).encode()
    digest = hashlib.sha256(b"".join([*sources, flags])).hexdigest()
    return FOLDER / f"kernels-{digest[:12]}.so"


def compiled() -> Path | None:
    """Compile the library if needed, and return its path; None if it cannot be compiled here. Everything works without it."""
    target = library()
    compiler = os.environ.get("CC") or shutil.which("cc")
    if target.exists() or not compiler or os.name == "nt":
        return target if target.exists() else None
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            sources = map(str, sorted(FOLDER.glob("*.c")))
            command = [*compiler.split(), *FLAGS, "-o", str(built), *sources, "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            built.replace(target)  # at once: another process may be looking for it
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or error
        print(
            f"dualform: its C code was not compiled, recording and questions will be slower: {message}", file=sys.stderr
        )
        return None
    for old in target.parent.glob("kernels-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


if __name__ == "__main__":
    print(compiled() or "there is no C compiler: set CC, or install one")
