"""The versions that are declared, tested as the oldest, and installed by `make` agree with each other."""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[1]
PROJECTS = ["pyproject.toml", "paper/pyproject.toml"]
OURS = {"dualform", "dualform-paper"}
EXTRAS = ["demo", "evaluate", "explorer"]
"""What `make oldest` installs of the optional dependencies."""
ONLY_PINNED = {"click"}
"""Dependencies of our dependencies whose version matters, with the reason in constraints-oldest.txt."""


def project(path):
    return tomllib.loads((ROOT / path).read_text())["project"]


def requirements(path):
    declared = project(path)
    optional = declared["optional-dependencies"]
    texts = [*declared["dependencies"], *(text for extra in EXTRAS for text in optional.get(extra, []))]
    found = {canonicalize_name(Requirement(text).name): Requirement(text) for text in texts}
    return {name: requirement for name, requirement in found.items() if name not in OURS}


def pins(path):
    """The version of each package in a constraints file, as a requirement `name==version`."""
    lines = [line.split("#")[0].strip() for line in (ROOT / path).read_text().splitlines()]
    pinned = [Requirement(line) for line in lines if line]
    return {canonicalize_name(pin.name): pin for pin in pinned}


def version(requirement, operator):
    [specifier] = requirement.specifier
    assert specifier.operator == operator, requirement
    return specifier.version


@pytest.mark.parametrize("path", PROJECTS)
def test_the_oldest_versions_are_the_declared_lower_bounds(path):
    oldest = pins("constraints-oldest.txt")
    for name, requirement in requirements(path).items():
        pinned = version(oldest[name], "==")
        bound = version(requirement, ">=")
        assert Requirement(f"{name}=={bound}").specifier.contains(pinned), (
            f"{requirement}, but {oldest[name]} is tested"
        )


def test_every_oldest_version_belongs_to_a_dependency():
    declared = {name for path in PROJECTS for name in requirements(path)}
    assert pins("constraints-oldest.txt").keys() == declared | ONLY_PINNED


@pytest.mark.parametrize("path", PROJECTS)
def test_the_installed_versions_are_within_the_bounds(path):
    newest = pins("constraints.txt")
    for name, requirement in requirements(path).items():
        assert requirement.specifier.contains(version(newest[name], "==")), requirement


def test_both_packages_declare_the_same_versions_of_python():
    library, paper = map(project, PROJECTS)
    assert library["requires-python"] == paper["requires-python"]
    assert library["classifiers"] == paper["classifiers"]
