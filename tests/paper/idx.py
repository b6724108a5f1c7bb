"""Tiny datasets in the format of MNIST's files, under the names of the real ones."""

import gzip
import hashlib
from dataclasses import replace

import numpy as np

from dualform_paper import data


def contents(seed, *, train=300, test=60):
    """The four files, in the order of data.FILES: each class is a pattern with noise."""
    random = np.random.default_rng(seed)
    patterns = random.integers(0, 200, size=(10, 28, 28))
    files = []
    for count in (train, test):
        labels = np.arange(count) % 10
        pixels = (patterns[labels] + random.integers(0, 56, size=(count, 28, 28))).astype(np.uint8)
        head = b"".join(number.to_bytes(4, "big") for number in (2051, count, 28, 28))
        files.append(head + pixels.tobytes())
        files.append((2049).to_bytes(4, "big") + count.to_bytes(4, "big") + labels.astype(np.uint8).tobytes())
    return files


def write(folder, files, *, packed=True):
    """Into folder, which is a dataset's own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(data.FILES.values(), files, strict=True):
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def source(name, files, **others):
    """The real source of a dataset, but for these files."""
    sums = tuple(hashlib.sha256(content).hexdigest() for content in files)
    return replace(data.SOURCES[name], sums=sums, **others)
