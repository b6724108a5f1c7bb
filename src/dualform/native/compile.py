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
# -fno-math-errno is none of that: a square root need not set errno, so that it can be one of many at a time
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-shared", "-fPIC")


def library() -> Path:
    """Where the library is, once compiled. Named after what it is made of: an older one is never taken for it."""
    made_of = [path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]"))]
    digest = hashlib.sha256(b"".join([*made_of, " ".join(FLAGS).encode()])).hexdigest()
    return FOLDER / f"kernels-{digest[:12]}.so"


def compiled() -> Path | None:
    """Compile, if that has not been done; None if it cannot be done here: everything works without."""
    target = library()
    compiler = os.environ.get("CC") or shutil.which("cc")
    if target.exists() or not compiler or os.name == "nt":
        return target if target.exists() else None
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [*compiler.split(), *FLAGS, "-o", str(made), *map(str, sorted(FOLDER.glob("*.c"))), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            made.replace(target)  # at once: another process may be looking for it
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        print(f"dualform: its C code was not compiled, recording and questions will be slower: {said}", file=sys.stderr)
        return None
    for old in target.parent.glob("kernels-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


if __name__ == "__main__":
    print(compiled() or "there is no C compiler: set CC, or install one")
