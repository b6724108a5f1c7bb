"""The store: a folder of sealed chunks. The writer and the reader share the format and nothing else."""
