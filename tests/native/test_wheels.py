"""What is built for people who install dualform, with a C compiler and without one."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dualform.native.kernels import kernels

ROOT = Path(__file__).parents[2]


def build(target: str, source: Path, folder: Path, **environment: str) -> Path:
    """Build the sdist or the wheel of a source folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, env={**os.environ, **environment})
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder / "built")) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("dualform-*")
    return unpacked


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_without_a_compiler_the_sdist_gives_a_pure_wheel(source: Path, tmp_path: Path) -> None:
    wheel = build("wheel", source, tmp_path, CC="no-such-compiler")
    assert wheel.name.endswith("py3-none-any.whl")
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "dualform").rglob("*.py")}
    assert modules <= files_in(wheel)
    assert not any(name.endswith(".so") for name in files_in(wheel))


def test_with_a_compiler_the_wheel_holds_the_loops_for_any_python(source: Path, tmp_path: Path) -> None:
    if kernels() is None:
        pytest.skip("the loops in C are not compiled")
    wheel = build("wheel", source, tmp_path)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("any.whl")
    assert sum(name.endswith(".so") for name in files_in(wheel)) == 1


def test_the_sdist_holds_no_figures_and_is_small(source: Path) -> None:
    assert not (source / "docs").exists()
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert size < 5_000_000
