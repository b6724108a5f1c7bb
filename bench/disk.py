"""Disk per slot beside the plain float32 pair, and what compression or sparse storage would bring.

DUALFORM_DATA=… python bench/disk.py
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

import recordings
from measure import machine

OUT = Path(__file__).parent / "results" / "disk.json"


def zstd(data: bytes) -> tuple[int, float]:
    """Size, and seconds to read, of zstd at its fastest, by way of Parquet (Polars brings it)."""
    frame, target = pl.DataFrame({"bytes": np.frombuffer(data, np.uint8)}), recordings.FOLDER / "zstd.parquet"
    frame.write_parquet(target, compression="zstd", compression_level=1, statistics=False)
    used = time.process_time()
    pl.read_parquet(target)
    read, size = time.process_time() - used, target.stat().st_size
    target.unlink()
    return size, read


if __name__ == "__main__":
    found, table = {}, Table()
    for name in (
        "stored as",
        "layer",
        "what",
        "bytes a slot",
        "of plain float32",
        "zstd",
        "zstd reads",
        "sparse",
        "not zero",
    ):
        table.add_column(name)
    for dtype in ("float32", "float16"):
        store = recordings.recorded(dtype).store
        slots, plain = store.slots("2"), sum(4 * (y.d_in + y.d_out) for y in store.manifest.layers)
        files = sum(file.size for chunk in store.manifest.chunks for file in chunk.files.values())
        found[dtype] = {"bytes a row": files / slots, "plain float32 pairs": plain, "share": files / slots / plain}
        for layer in store.manifest.layers:
            for what in ("key", "error"):
                width = layer.d_in if what == "key" else layer.d_out
                _, piece = list(store.stored(layer.name, what))[len(store.manifest.chunks) // 4]
                some = piece.data[:2048].contiguous()
                a_slot = (
                    sum(len(some.data) for _, some in store.stored(layer.name, what))
                    * some.element_size()
                    * width
                    / slots
                )
                size, read = zstd(some.numpy().tobytes())
                filled = float((some != 0).double().mean())
                sparse = filled + 1 / (8 * some.element_size())  # a bit for each element, and those that are not zero
                table.add_row(
                    dtype, layer.name, what, f"{a_slot:,.0f}", f"{a_slot / (4 * width):.2f}", f"{size / some.nbytes:.2f}",
                    f"{some.nbytes / max(read, 1e-9) / 1e9:.1f} GB/s", f"{sparse:.2f}", f"{filled:.2f}",
                )  # fmt: skip
                found[f"{dtype} {layer.name} {what}"] = {
                    "bytes a slot": a_slot, "zstd": size / some.nbytes, "zstd reads, bytes a second": some.nbytes / max(read, 1e-9),
                    "sparse": sparse, "not zero": filled,
                }  # fmt: skip
    Console(width=130).print(table)
    for dtype in ("float32", "float16"):
        print(f"{dtype}: everything, {found[dtype]['bytes a row']:,.0f} bytes a row of three layers, "
              f"{found[dtype]['share']:.2f} of the plain float32 pairs")  # fmt: skip
    OUT.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
