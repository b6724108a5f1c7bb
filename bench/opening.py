"""How long opening takes for a store of many slots, beside reading its manifest alone.

python bench/opening.py [10000000]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import dualform
import synthetic
from dualform.store.format import MANIFEST

if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        # Narrow vectors in small chunks: about as many chunks as 10 million slots of width 800 make in chunks of 64 MB
        synthetic.write(folder, slots=count, d_in=16, d_out=4, dtype="float16", batch=4096, chunk_bytes=1 << 20)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            dual = dualform.open(folder)
            times.append(time.perf_counter() - began)
        chunks, size = len(dual.store.manifest.chunks), (folder / MANIFEST).stat().st_size
        print(
            f"{dual.store.slots('map'):,} slots, {dual.store.nbytes / 1e6:.0f} MB, {chunks} chunks, manifest {size / 1e3:.0f} kB: "
            f"open {sorted(times)[2] * 1e3:.1f} ms (median of 5)"
        )
