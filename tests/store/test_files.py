"""Special files in the place of a store's own, and errors of the system: clear errors with a cure, and no waiting."""

import errno
import os
import shutil
import signal
import socket
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from inconsistent import answers, linked_copy, network, record

import dualform
from dualform.errors import (
    DualformError,
    StoreDamagedError,
    StoreError,
    StoreExistsError,
    StorePermissionError,
    WriterError,
)
from dualform.store import files
from dualform.store.format import LOCK, MANIFEST


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access") / "whole"
    record(folder)
    return folder


@pytest.fixture
def store(whole, tmp_path):
    return linked_copy(whole, tmp_path / "run")


@pytest.fixture(scope="module")
def small_whole(tmp_path_factory):
    """One chunk, for tests that ask again and again."""
    folder = tmp_path_factory.mktemp("access") / "small"
    record(folder, steps=2)
    return folder


@pytest.fixture
def small(small_whole, tmp_path):
    return linked_copy(small_whole, tmp_path / "run")


@pytest.fixture(autouse=True)
def no_waiting():
    """Opening a named pipe would wait for its other end, for ever."""

    def hang(*_):
        raise TimeoutError("a hang")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# Special files


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def dangling_link(path):
    path.symlink_to(path.parent / "nowhere")


def outside(path):
    """Where something goes that is moved out of the store `run`."""
    [run] = [parent for parent in path.parents if parent.name == "run"]
    return run.parent / f"outside-{path.name}"


def link_outside(path):
    path.symlink_to(outside(path))


def listening_socket(path):
    short = Path("/tmp") / f"dualform-{os.getpid()}"  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short))
    short.rename(path)


def device(path):
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        pytest.skip("only root may make devices")


SPECIAL = {
    pipe: "a named pipe",
    folder: "a directory",
    link_outside: "a symbolic link",
    dangling_link: "a symbolic link",
    listening_socket: "a socket",
    device: "a device",
}
FILES = [
    MANIFEST,
    "chunk-000000/slots.safetensors",
    "chunk-000001/rows.parquet",
    "chunk-000002/updates.parquet",
    "chunk-000003/steps.parquet",
    "snapshot-000000008.safetensors",
    "totals-000000/totals.safetensors",
    "totals-000000/groups-000.parquet",
]


def put(special, path):
    """Move what is there out of the store, and put something else in its place."""
    path.rename(outside(path))
    special(path)


@pytest.mark.parametrize("special", list(SPECIAL))
@pytest.mark.parametrize("name", FILES)
def test_a_special_file_is_refused_by_name(store, special, name):
    put(special, store / name)
    with pytest.raises(
        StoreDamagedError, match=rf"{Path(name).name} is {SPECIAL[special]}; expected a regular file"
    ) as raised:
        dualform.open(store)
    assert str(store / name) in str(raised.value)


@pytest.mark.parametrize("name", ["chunk-000001", "totals-000000"])
@pytest.mark.parametrize("special", [pipe, link_outside])
def test_a_folder_of_the_store_that_is_none(store, name, special):
    put(special, store / name)
    with pytest.raises(StoreDamagedError, match=rf"{name} is {SPECIAL[special]}; expected a folder"):
        dualform.open(store)


@pytest.mark.parametrize("special", list(SPECIAL))
@pytest.mark.parametrize("name", FILES[1:])
def test_a_special_file_after_the_store_was_opened(store, special, name):
    dual = dualform.open(store, network())
    put(special, store / name)
    with pytest.raises(StoreDamagedError, match=rf"{Path(name).name} is {SPECIAL[special]}"):
        ask(dual)


def ask(dual):
    """Touch every file."""
    opened = dual.store
    opened.rows, opened.updates, opened.log, opened.groups(0), opened.totals()
    for layer in dual.layers:
        list(opened.chunks(layer))
    for step in opened.snapshot_steps():
        opened.snapshot(step)


def test_the_folder_itself_may_be_a_link(store, tmp_path):
    (tmp_path / "link").symlink_to(store)
    assert answers(tmp_path / "link") == answers(store)


def test_the_cure_for_links_works(store, tmp_path):
    put(link_outside, store / "chunk-000001")
    shutil.copytree(store, tmp_path / "resolved")  # follows links, as cp -rL does
    assert answers(tmp_path / "resolved")


@pytest.mark.parametrize("special", [pipe, link_outside, folder, device])
def test_a_special_file_as_lock(store, special):
    precious = outside(store / LOCK)
    (store / LOCK).unlink()
    special(store / LOCK)
    if special is link_outside:
        precious.write_text("precious")
    for write in (lambda: record(store, overwrite=True), lambda: dualform.build_totals(store, "sample_id")):
        with pytest.raises(StoreDamagedError, match=rf"{LOCK} is {SPECIAL[special]}"):
            write()
    if special is link_outside:
        assert precious.read_text() == "precious"


@pytest.mark.parametrize("special", [pipe, link_outside])
@pytest.mark.parametrize("name", [f".{MANIFEST}", ".snapshot-000000004.safetensors"])
def test_nothing_is_written_through_links_and_pipes(store, special, name):
    precious = outside(store / name)
    precious.write_text("precious")
    special(store / name)
    record(store, steps=4, resume=2)
    assert precious.read_text() == "precious"
    assert answers(store)


@pytest.mark.parametrize("special", list(SPECIAL))
def test_overwriting_removes_special_files_and_not_what_links_lead_to(store, special):
    put(special, store / "chunk-000001")
    put(special, store / "snapshot-000000002.safetensors")
    record(store, overwrite=True)
    assert (outside(store / "chunk-000001") / "slots.safetensors").is_file()
    assert answers(store)


@pytest.mark.parametrize("special", [pipe, folder, link_outside, device])
def test_a_folder_with_a_special_manifest_is_not_overwritten(store, special):
    put(special, store / MANIFEST)
    with pytest.raises(StoreExistsError, match="holds no recording"):
        record(store, overwrite=True)
    assert (store / "chunk-000001").is_dir()


# Errors of the system: one is injected at each call, in turns

CALLS = [
    "open",
    "lstat",
    "fstat",
    "unlink",
    "mkdir",
    "rename",
    "replace",
    "fsync",
    "writev",
    "rmdir",
    "scandir",
    "listdir",
]


class Failing:
    """The n-th of some calls of the system that concern a folder fails."""

    def __init__(self, monkeypatch, folder, code, number):
        self.failed = None
        self._left = number
        for name in CALLS:
            original = getattr(os, name)
            monkeypatch.setattr(os, name, self._wrapped(name, original, str(folder), code))

    def _wrapped(self, name, original, folder, code):
        def call(*given, **named):
            target = given[0]
            if isinstance(target, int):
                with suppress(OSError):
                    target = os.readlink(f"/proc/self/fd/{target}")
            if self.failed is None and str(target).startswith(folder):
                self._left -= 1
                if self._left < 0:
                    self.failed = f"{name} of {target}"
                    raise OSError(code, os.strerror(code), str(target))
            return original(*given, **named)

        return call


def each_failing(folder, code, work, prepare=lambda: None):
    """Let each call of the system fail in turns; gives the errors by what failed."""
    found = {}
    for number in range(10_000):
        prepare()
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, folder, code, number)
            try:
                work()
            except Exception as error:
                found.setdefault(failing.failed, error)
        if failing.failed is None:
            return found
    raise AssertionError("no end")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE, errno.EINVAL], ids=errno.errorcode.get)
def test_reading_fails_with_store_errors_whatever_the_system_says(small, code):
    found = each_failing(small, code, lambda: ask(dualform.open(small)))
    assert len(found) > 15
    for failed, error in found.items():
        assert isinstance(error, StoreError), (failed, error)
        assert os.strerror(code) in str(error), (failed, error)
        assert str(small) in str(error)
        assert ". " in str(error), "no cure"
        assert isinstance(error, PermissionError) == (code == errno.EACCES)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EINVAL], ids=errno.errorcode.get)
@pytest.mark.parametrize("settings", [{}, {"overwrite": True}], ids=["new", "overwrite"])
def test_record_fails_with_store_errors_whatever_the_system_says(tmp_path, small_whole, code, settings):
    run = tmp_path / "run"

    def prepare():
        shutil.rmtree(run, ignore_errors=True)
        if settings:
            linked_copy(small_whole, run)

    def begin():
        model = network()
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run, **settings).close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "dualform.store.writer.threading.Thread", Idle
        )  # what fails in the background is tested elsewhere
        found = each_failing(run, code, begin, prepare)
    assert len(found) > 8
    for failed, error in found.items():
        assert isinstance(error, StoreError), (failed, error)
        assert os.strerror(code) in str(error), (failed, error)
        assert str(run) in str(error)
        assert ". " in str(error), "no cure"
        written = "cannot be written" in str(error)
        denied = code == errno.EACCES or (code == errno.EROFS and written)
        assert isinstance(error, PermissionError) == denied, (failed, error)
        if code == errno.ENOSPC and written:
            assert isinstance(error, WriterError)
            assert "The disk is full: free some space, or choose a folder on another disk." in str(error)


class Idle(threading.Thread):
    """The thread of a writer that is asked to stop before it gets anything to write."""

    def start(self):
        background = self._target.__self__
        background.is_abandoned = True
        super().start()


def test_after_a_full_disk_the_folder_can_be_used_again(tmp_path, monkeypatch):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def full(descriptor, pieces):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_pieces", full)
        with pytest.raises(WriterError, match=r"No space left on device\. The disk is full"):
            dualform.record(model, optimizer, tmp_path / "run")
    record(tmp_path / "run")
    assert answers(tmp_path / "run")


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
def test_building_totals_fails_with_store_errors_whatever_the_system_says(small, code):
    found = each_failing(small, code, lambda: dualform.build_totals(small, "sample_id"))
    assert len(found) > 20
    for failed, error in found.items():
        assert isinstance(error, StoreError), (failed, error)
        assert str(small) in str(error), (failed, error)
    assert answers(small)


def test_the_command_line_says_it_in_one_line(store, monkeypatch):
    from typer.testing import CliRunner

    from dualform.cli import app

    with pytest.MonkeyPatch.context() as patch:
        Failing(patch, store, errno.EACCES, 0)
        found = CliRunner().invoke(app, ["info", str(store)])
    assert found.exit_code == 2
    assert found.stderr.startswith("error: ")
    assert "cannot be read: Permission denied. Ask its owner for the right to read it" in found.stderr


def test_cures_are_sentences():
    for cure in files.CURES.values():
        assert cure.endswith(".")
    assert files.cure_of(OSError(errno.ENOSPC, "full")).startswith(" The disk is full")
    assert files.cure_of(OSError("?")) == ""
    assert files.cure_of(RuntimeError("?")) == ""
    assert issubclass(StorePermissionError, (DualformError, PermissionError))


# Overwriting


def test_overwriting_flushes_the_folder_between_manifest_and_chunks(store, monkeypatch):
    """Else loss of power could leave a manifest whose chunks are gone."""
    done = []
    original = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path, **k: done.append(Path(path).name) or original(path, **k))

    def unlink(path, missing_ok=False):
        with suppress(FileNotFoundError) if missing_ok else nullcontext():
            os.unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    removed = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, *a, **k: done.append(Path(path).name) or removed(path, *a, **k))

    def flush(descriptor):
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    monkeypatch.setattr(os, "fsync", flush)
    record(store, overwrite=True)
    manifest = done.index(MANIFEST)
    chunks = [place for place, name in enumerate(done) if name.startswith(("chunk-", "snapshot-", "totals-"))]
    assert len(chunks) > 5
    assert done[manifest + 1] == f"flush {store.name}"
    assert min(chunks) > manifest + 1
