"""Where the paper's texts are looked for, and what is said when they are not there."""

import hashlib
import zipfile
from pathlib import Path

import pooch
import pytest

from dualform.errors import DataError
from dualform_paper import texts

BOOK = "THE WOLF AND THE LAMB\n\nONE day … naïve"
EDITIONS = {
    "old": f"﻿Project Gutenberg\n\n{BOOK}\n\n\nEnd of the Project Gutenberg EBook\n\n*** END OF THIS\n\nlicence",
    "new": f"The Project Gutenberg eBook\n{BOOK}\n\n*** END OF THE PROJECT\n",
}
WIKI = {f"wiki.{part}.tokens": f" \n = {part} = \n" for part in ("train", "valid", "test")}


def summed(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def places(tmp_path, monkeypatch):
    aesop, wiki = texts.SOURCES["aesop"], texts.SOURCES["wikitext-2"]
    addresses = ("http://first/a.txt", "http://second/b.txt")
    monkeypatch.setitem(texts.SOURCES, "aesop", texts.Source("", addresses, {"49010-0.txt": summed(BOOK)}, aesop.used))
    sums = {file: summed(text) for file, text in WIKI.items()}
    monkeypatch.setitem(texts.SOURCES, "wikitext-2", texts.Source("", ("http://first/w.zip",), sums, wiki.used))
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path / "variable"))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    monkeypatch.setattr(pooch, "retrieve", served({}))
    return tmp_path


def served(content):
    """A pooch.retrieve that knows some addresses."""

    def retrieve(url, known_hash, fname, path, **options):
        if url not in content:
            raise OSError(f"no way to {url}")
        target = Path(path) / fname
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content[url])
        return str(target)

    return retrieve


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("edition", EDITIONS)
@pytest.mark.parametrize("place", ["argument", "variable", "cache"])
def test_a_text_is_found_in_any_edition(places, place, edition, ends):
    path = places / place / "aesop" / "49010-0.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(EDITIONS[edition].replace("\n", ends).encode())
    assert texts.files("aesop", places / "argument") == {"49010-0.txt": BOOK}


def test_another_text(places):
    path = places / "variable" / "aesop" / "49010-0.txt"
    path.parent.mkdir(parents=True)
    path.write_text("something else")
    with pytest.raises(DataError, match=r"is not aesop's 49010-0.txt: the sha256 .* Remove it"):
        texts.files("aesop")


def test_a_download_is_checked_and_kept(places, monkeypatch):
    content = {"http://first/a.txt": b"<html>no</html>", "http://second/b.txt": EDITIONS["new"].encode()}
    monkeypatch.setattr(pooch, "retrieve", served(content))
    assert texts.files("aesop") == {"49010-0.txt": BOOK}
    monkeypatch.setattr(pooch, "retrieve", served({}))
    assert texts.files("aesop") == {"49010-0.txt": BOOK}
    assert [path.name for path in (places / "cache" / "aesop").iterdir()] == ["49010-0.txt"]


def test_an_archive(places, monkeypatch):
    archive = places / "w.zip"
    with zipfile.ZipFile(archive, "w") as written:
        for file, text in WIKI.items():
            written.writestr(f"wikitext-2/{file}", text)
    monkeypatch.setattr(pooch, "retrieve", served({"http://first/w.zip": archive.read_bytes()}))
    assert texts.files("wikitext-2") == WIKI
    monkeypatch.setattr(pooch, "retrieve", served({}))
    assert texts.files("wikitext-2") == WIKI


def test_an_archive_that_lacks_a_file(places, monkeypatch):
    archive = places / "w.zip"
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("wikitext-2/wiki.train.tokens", WIKI["wiki.train.tokens"])
    monkeypatch.setattr(pooch, "retrieve", served({"http://first/w.zip": archive.read_bytes()}))
    with pytest.raises(DataError, match=r"w.zip has no wiki.valid.tokens, wiki.test.tokens"):
        texts.files("wikitext-2")


@pytest.mark.parametrize("content", [b"<html>no</html>", b""])
def test_no_download(places, monkeypatch, content):
    monkeypatch.setattr(pooch, "retrieve", served({"http://first/w.zip": content}))
    with pytest.raises(DataError) as problem:
        texts.files("wikitext-2", places / "argument")
    said = str(problem.value)
    assert "no wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens in" in said
    assert "--data or DUALFORM_DATA" in said
    assert "http://first/w.zip: " in said
    assert not list((places / "cache" / "wikitext-2").iterdir())


def test_an_unknown_text():
    with pytest.raises(DataError, match="no text 'faust'; known are 'aesop', 'wikitext-2'"):
        texts.files("faust")
