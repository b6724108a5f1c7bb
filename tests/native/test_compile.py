import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dualform.native import compile as compiling
from dualform.native.kernels import kernels


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources in a folder of their own, not compiled yet; gives one of them."""
    for source in compiling.FOLDER.glob("*.[ch]"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(compiling, "FOLDER", tmp_path)
    return tmp_path / "replaying.c"


def test_without_a_compiler_there_is_none(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiling.compiled() is None
    assert "will be slower" in capsys.readouterr().err
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert compiling.compiled() is None


def test_a_source_that_does_not_compile_is_told(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kernels() is None:
        pytest.skip("the loops in C are not compiled")
    copy.write_text("int slots(")
    assert compiling.compiled() is None
    assert "will be slower" in capsys.readouterr().err
    assert {path.suffix for path in copy.parent.iterdir()} == {".c", ".h"}


@pytest.mark.parametrize("name", ["replaying.c", "loops.h"])
def test_an_older_library_is_never_taken(copy: Path, name: str) -> None:
    if kernels() is None:
        pytest.skip("the loops in C are not compiled")
    first = compiling.compiled()
    assert first is not None
    assert compiling.compiled() == first
    changed = copy.with_name(name)
    changed.write_text(changed.read_text() + "\n")
    assert compiling.library() != first
    second = compiling.compiled()
    assert second == compiling.library()
    assert not first.exists()


def test_the_library_leaves_small_numbers_as_they_are() -> None:
    """-ffast-math would set the processor to flush them to zero, for the training as well."""
    kernels()
    assert torch.full((64,), 1e-40).mul(1).gt(0).all()


@pytest.mark.parametrize("value", ["0", "1"])
def test_it_can_be_turned_off(value: str) -> None:
    code = "from dualform.native.kernels import kernels; print(kernels() is None)"
    environment = {**os.environ, "DUALFORM_NATIVE": value}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == str(value == "0" or not compiling.library().exists())
