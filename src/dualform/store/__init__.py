"""Recordings on disk.

- What there is: `format` (names and manifest), `labels` (which run a file belongs to), `consistency` (whether everything fits).
- Files: `files` (the interface, and a folder on this machine), `lock` (one writer at a time), `tensors` (safetensors), `tables` (Parquet),
  `parquet` (what a Parquet file says about itself).
- Writing: `records` (what the recorder hands over), `encoding` (how vectors are stored), `memory` (pools), `chunks` (from steps to tensors),
  `writer` (the thread that seals chunks, snapshots and totals).
- Reading: `catalog` (snapshots, totals and tables, without PyTorch), `reader` (the store), `samples` (texts of samples), `slots` (a layer's slots in a chunk).
"""
