"""The cache: bounded, shared, and as good as empty where it is damaged."""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import pytest

from dualform.errors import StoreError
from dualform.store.cache import Cache, cache_folder


def part(number, size=1000):
    return np.full(size, number, np.uint8)


def sizes(folder):
    return [path.stat().st_size for path in folder.rglob("*") if path.is_file()]


def test_what_is_kept_comes_back(tmp_path):
    assert Cache(tmp_path).get("a") is None
    assert (Cache(tmp_path).put("a", part(7)) == 7).all()
    assert np.array_equal(Cache(tmp_path).get("a"), part(7))


@pytest.mark.parametrize("change", ["a byte", "the end", "everything"])
def test_a_damaged_part_is_removed(tmp_path, change):
    cache = Cache(tmp_path)
    cache.put("a", part(7))
    path = tmp_path / "parts" / "a"
    content = path.read_bytes()
    changed = {"a byte": b"?" + content[1:], "the end": content[:-1], "everything": b""}[change]
    path.unlink()
    path.write_bytes(changed)
    assert cache.get("a") is None
    assert np.array_equal(cache.put("a", part(7)), part(7))
    assert np.array_equal(cache.get("a"), part(7))


def test_the_least_recently_used_parts_go_first(tmp_path):
    cache = Cache(tmp_path, most_bytes=10_000)
    for number in range(9):
        cache.put(str(number), part(number))
        os.utime(tmp_path / "parts" / str(number), (number, number))
    assert cache.get("0") is not None  # used just now
    for number in range(9, 12):
        cache.put(str(number), part(number))
    left = {path.name for path in (tmp_path / "parts").iterdir()}
    assert "0" in left
    assert not {"1", "2"} & left
    assert sum(sizes(tmp_path)) <= 10_000


def test_a_removed_part_keeps_its_bytes_for_whoever_has_it(tmp_path):
    cache = Cache(tmp_path)
    mine = cache.put("a", part(7))
    cache.remove("a")
    assert cache.get("a") is None
    assert np.array_equal(mine, part(7))


def test_a_part_larger_than_the_bound_is_not_kept(tmp_path):
    cache = Cache(tmp_path, most_bytes=500)
    assert np.array_equal(cache.put("a", part(7)), part(7))
    assert cache.get("a") is None


def test_made_files_count(tmp_path):
    cache = Cache(tmp_path, most_bytes=10_000)
    cache.folder_for("store").write("curvature", bytes(9_000))
    os.utime(tmp_path / "made" / "store" / "curvature", (0, 0))
    cache.put("a", part(1, 5_000))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a"]


def test_files_of_killed_writers_are_removed_in_the_end(tmp_path):
    cache = Cache(tmp_path, most_bytes=3_000)
    cache.put("a", part(1))
    for name, age in ((".old", 7200), (".new", 60)):
        (tmp_path / "parts" / name).write_bytes(bytes(1_500))
        then = time.time() - age
        os.utime(tmp_path / "parts" / name, (then, then))
    cache = Cache(tmp_path, most_bytes=3_000)
    cache.put("b", part(2))
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {"a", "b", ".new"}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("no folder")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(
        UserWarning, match=r"cannot be written .*so what is read from elsewhere is not kept.*DUALFORM_CACHE"
    ):
        assert np.array_equal(cache.put("a", part(7)), part(7))
    assert np.array_equal(cache.put("b", part(8)), part(8))  # warned once
    assert cache.get("a") is None


def _use(folder, worker):
    cache = Cache(folder, most_bytes=40_000)
    random = np.random.default_rng(worker)
    wrong = 0
    for number in random.integers(0, 60, 150).tolist():
        found = cache.get(str(number))
        if found is None:
            found = cache.put(str(number), part(number))
        wrong += not np.array_equal(found, part(number))
    return wrong


def test_several_processes(tmp_path):
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        assert list(pool.map(partial(_use, tmp_path), range(2))) == [0, 0]
    # A process measures the folder when it has itself written a 32nd of the bound
    assert sum(sizes(tmp_path)) <= 40_000 * (1 + 2 / 32) + 2 * 1008


@pytest.mark.parametrize(
    ("text", "nbytes"), [("500MB", 500_000_000), ("2 gb", 2 * 10**9), ("0.5K", None), ("1000", 1000)]
)
def test_the_size_setting(monkeypatch, tmp_path, text, nbytes):
    monkeypatch.setenv("DUALFORM_CACHE_SIZE", text)
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    if nbytes is None:
        with pytest.raises(StoreError, match=r"DUALFORM_CACHE_SIZE='0.5K': expected a size such as"):
            Cache()
    else:
        assert Cache().most_bytes == nbytes
