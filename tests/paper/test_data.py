"""Where datasets are looked for, and what is said when they are not there."""

import gzip
from pathlib import Path

import numpy as np
import pooch
import pytest
from idx import contents, source, write

from dualform.errors import DataError
from dualform_paper import data

FILES = contents(0, train=20, test=10)
OTHER = contents(1, train=20, test=10)
FIRST = next(iter(data.FILES.values()))


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Every place that is looked at, all empty; and no network."""
    package = tmp_path / "package"
    monkeypatch.setitem(
        data.SOURCES,
        "mnist",
        source("mnist", FILES, package=str(package), addresses=("http://first/", "http://second/")),
    )
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path / "variable"))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    monkeypatch.setattr(pooch, "retrieve", no_network)
    return {
        "argument": tmp_path / "argument" / "mnist",
        "variable": tmp_path / "variable" / "mnist",
        "cache": tmp_path / "cache" / "mnist",
        "package": package,
    }


def no_network(url, *others, **options):
    raise OSError(f"no way to {url}")


def served(content):
    """A pooch.retrieve that finds bytes by the beginning of an address; counts what it is asked."""

    def retrieve(url, known_hash, fname, path, **options):
        retrieve.asked.append(url)
        (found,) = (files for address, files in content.items() if url.startswith(address))
        target = Path(path) / fname
        if not target.exists():  # so does pooch
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(found[list(data.FILES.values()).index(fname.removesuffix(".gz"))])
        return str(target)

    retrieve.asked = []
    return retrieve


def packed(files):
    return [gzip.compress(content) for content in files]


@pytest.mark.parametrize("as_gz", [True, False])
@pytest.mark.parametrize("place", ["argument", "variable", "cache", "package"])
def test_a_dataset_is_found(places, tmp_path, place, as_gz):
    write(places[place], FILES, packed=as_gz)
    folder = tmp_path / "argument"
    for part, count, first in (("train", 20, 0), ("test", 10, 2)):
        found = data.images("mnist", part, folder)
        assert (found.name, found.part) == ("mnist", part)
        assert found.pixels.shape == (count, 28, 28)
        assert found.pixels.tobytes() == FILES[first][16:]
        assert found.labels.tolist() == [n % 10 for n in range(count)]
        assert found.labels.dtype == np.int64


def test_the_order_of_search(places, tmp_path):
    """The first place that has the file decides: here that of a file that is another one."""
    folder = tmp_path / "argument"
    order = list(places)
    for place in reversed(order):
        write(places[place], OTHER)
        with pytest.raises(DataError) as problem:
            data.images("mnist", "train", folder)
        assert str(places[place] / f"{FIRST}.gz") in str(problem.value)


def test_a_packed_file_comes_before_a_plain_one(places):
    write(places["cache"], FILES)
    write(places["cache"], OTHER, packed=False)
    assert data.images("mnist", "train").pixels.tobytes() == FILES[0][16:]


def test_without_the_variable(places, monkeypatch):
    write(places["variable"], FILES)
    monkeypatch.setenv("DUALFORM_DATA", "")
    with pytest.raises(DataError, match="no download"):
        data.images("mnist", "train")


@pytest.mark.parametrize("as_gz", [True, False])
def test_a_file_with_other_content(places, as_gz):
    write(places["variable"], OTHER, packed=as_gz)
    with pytest.raises(DataError, match=r"is not mnist's train-images.*sha256.*Remove it"):
        data.images("mnist", "train")


def spoilt(content):
    """A gzip file whose beginning is right."""
    return content[:20] + bytes(byte ^ 0xFF for byte in content[20:40]) + content[40:]


DAMAGES = {"cut": lambda c: c[: len(c) // 2], "foreign": lambda c: b"<html>no</html>", "spoilt": spoilt}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_unpacked(places, damage):
    write(places["variable"], FILES)
    path = places["variable"] / f"{FIRST}.gz"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DataError, match=f"{FIRST}.gz cannot be read: "):
        data.images("mnist", "train")


def test_no_network(places, tmp_path):
    with pytest.raises(DataError) as problem:
        data.images("mnist", "test", tmp_path / "argument")
    said = str(problem.value)
    for place in places.values():
        assert str(place) in said
    assert "http://first/t10k-images-idx3-ubyte.gz: no way to http://first/t10k-images-idx3-ubyte.gz" in said
    assert "http://second/t10k-images-idx3-ubyte.gz: no way" in said
    assert "--data or DUALFORM_DATA" in said
    assert "apt install dataset-mnist" in said


def test_no_package_of_the_system(places, monkeypatch):
    monkeypatch.setitem(data.SOURCES, "mnist", source("mnist", FILES, package=None))
    with pytest.raises(DataError) as problem:
        data.images("mnist", "test")
    assert "apt" not in str(problem.value)


def test_a_download_is_kept(places, monkeypatch):
    retrieve = served({"http://first/": packed(FILES)})
    monkeypatch.setattr(pooch, "retrieve", retrieve)
    assert data.images("mnist", "train").pixels.tobytes() == FILES[0][16:]
    assert retrieve.asked == [f"http://first/{name}.gz" for name in list(data.FILES.values())[:2]]
    assert (places["cache"] / f"{FIRST}.gz").is_file()
    monkeypatch.setattr(pooch, "retrieve", no_network)
    assert len(data.images("mnist", "train").labels) == 20


BAD = {"other": lambda c: gzip.compress(b"other"), **DAMAGES}


@pytest.mark.parametrize("bad", BAD)
def test_the_second_address_helps(places, monkeypatch, bad):
    first = [BAD[bad](content) for content in packed(FILES)]
    retrieve = served({"http://first/": first, "http://second/": packed(FILES)})
    monkeypatch.setattr(pooch, "retrieve", retrieve)
    assert data.images("mnist", "train").pixels.tobytes() == FILES[0][16:]
    assert [url.split("/")[2] for url in retrieve.asked] == ["first", "second"] * 2


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_download_is_not_kept(places, monkeypatch, bad):
    files = [BAD[bad](content) for content in packed(FILES)]
    monkeypatch.setattr(pooch, "retrieve", served({"http://first/": files, "http://second/": files}))
    with pytest.raises(DataError, match=r"no download \(http://first/train-.*: .*; http://second/train-.*: "):
        data.images("mnist", "train")
    assert not list(places["cache"].iterdir())


def test_an_unknown_dataset():
    with pytest.raises(DataError, match="no dataset 'cifar'; known are 'mnist', 'fashion-mnist'"):
        data.images("cifar", "train")


def test_each_dataset_has_ten_classes():
    for one in data.SOURCES.values():
        assert len(one.classes) == 10
        assert len(one.sums) == len(data.FILES)
