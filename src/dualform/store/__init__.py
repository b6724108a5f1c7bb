"""Recordings on disk.

- What there is: `format` (names and manifest), `labels` (which run a file belongs to), `consistency` (whether everything fits).
- Files: `files` (the interface, and a folder on this machine), `lock` (one writer at a time), `tensors` (safetensors), `tables` (Parquet),
  `parquet` (what a Parquet file says about itself).
- Elsewhere: `remote` (a store at an address, read through `cache`), `copying` (recordings from place to place), `uploads` (files to an address).
- Both ways: `encoding` (vectors to stored bytes and back), `memory` (buffers that are used again).
- Writing: `records` (what the recorder hands over), `chunks` (from steps to tensors), `writer` (the thread that seals chunks, snapshots and
  totals).
- Reading: `catalog` (opens a store: manifest, snapshots, totals, tables; needs no PyTorch), `chunk_files` (adds the files of chunks),
  `reader` (`Store`, which adds slots and rows),
  `samples` (texts of samples), `slots` (a layer's slots in a chunk).
- Several ranks: `shards` (the folder of a run), `run` (a `Store` that joins its shards: `open_store`), `joined_chunks` (their chunks as one),
  `joined` (their tensors as one), `cut` (a store up to an earlier step).
"""
