"""Large pages, where the system has them."""

import mmap
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dualform.store import pages
from dualform.store.mapped import TensorFile
from dualform.store.pages import LARGE_PAGE, in_large_pages, memory_bytes
from dualform.store.safe import write_tensors

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is asked for large pages")


def told(address):
    """What the system tells of the memory at an address."""
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(part, 16) for part in span.groups())
            inside = low <= address < high
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value.split()
    return found


@pytest.fixture
def cold(tmp_path):
    """A file that nobody has read: three tensors of 12 MB."""
    path, many = tmp_path / "many.safetensors", np.arange(3 << 20, dtype=np.int32)
    file = write_tensors(path, {name: [many] for name in "abc"})
    drop(path)
    return path, file, many


def drop(path):
    """Let the system forget what it has read of a file."""
    with path.open("rb") as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@linux
@pytest.mark.parametrize("large", [False, True])
def test_a_file_is_mapped_by_large_pages_if_that_is_wanted(cold, large):
    path, file, many = cold
    found = TensorFile(path, file, large_pages=large)["b"]
    np.testing.assert_array_equal(found, many)
    there = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert ("hg" in told(found.data_ptr())["VmFlags"]) == (large and there)


def mapped(address):
    """How many bytes of a file are mapped by large pages."""
    return 1024 * int(told(address)["FilePmdMapped"][0])


@linux
def test_the_system_gives_them(cold):
    path, file, many = cold
    found = TensorFile(path, file, large_pages=True)["b"]
    ours = mapped(found.data_ptr())
    other = path.with_name("other")  # the same, by who does nothing but ask and read
    write_tensors(other, {name: [many] for name in "abc"})
    drop(other)
    with other.open("rb") as handle:
        plain = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    plain.madvise(mmap.MADV_HUGEPAGE)
    content = np.frombuffer(plain, np.uint8)
    content.sum()
    if not mapped(content.ctypes.data):
        pytest.skip("this system, or this file system, maps no file by large pages")
    assert ours >= found.nbytes // 2


@pytest.mark.parametrize(
    ("begin", "nbytes", "asked"), [(0, LARGE_PAGE - 1, None), (5000, LARGE_PAGE, (4096, 904 + LARGE_PAGE))]
)
def test_whole_pages_are_asked_for(monkeypatch, begin, nbytes, asked):
    calls = []
    monkeypatch.setattr(pages.mmap, "PAGESIZE", 4096)
    monkeypatch.setattr(pages.mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(
        pages, "system_call", lambda name: lambda at, size, how: calls.append((name, at.value, size.value, how))
    )
    in_large_pages(begin, nbytes)
    assert calls == ([] if asked is None else [("madvise", *asked, 14)])


def test_systems_without_them(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    pages.system_call.cache_clear()
    assert pages.system_call("madvise") is None
    in_large_pages(0, 2 * LARGE_PAGE)
    pages.system_call.cache_clear()


@linux
def test_the_memory_is_that_of_the_machine_or_of_its_container(tmp_path, monkeypatch):
    every = int(re.search(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text()).group(1)) * 1024
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(pages, "LIMITS", (limit, tmp_path / "none"))
    assert memory_bytes() == every
    limit.write_text("max\n")
    assert memory_bytes() == every
    limit.write_text("1000000\n")
    assert memory_bytes() == 1_000_000


def test_nobody_knows_the_memory(monkeypatch):
    monkeypatch.setattr(pages, "LIMITS", ())
    monkeypatch.delattr(os, "sysconf_names")
    assert memory_bytes() == 0
