"""The paper's experiments are a package of their own, which uses dualform as any other user does."""

import ast
import re
from pathlib import Path

import pytest

import dualform
import dualform_paper
from dualform import plugins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public-api.md").read_text()
TABLE = PAGE.split("## Entry points")[0]
PUBLIC = {module for line in TABLE.splitlines() for module in re.findall(r"`(dualform[\w.]*)`", line.split(" | ")[0])}
MODULES = sorted(Path(dualform_paper.__file__).parent.rglob("*.py"))


def imports(path):
    """(module, name) of each import of a file; the name is None for `import module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def is_public(module, name):
    if not re.match(r"dualform(\.|$)", module):
        return True
    if module == "dualform" and name is not None:
        return name in dualform.__all__ or f"dualform.{name}" in PUBLIC
    return module in PUBLIC and not (name or "").startswith("_")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(Path(dualform_paper.__file__).parent)))
def test_it_imports_public_modules_only(path):
    private = [f"{module}: {name}" for module, name in imports(path) if not is_public(module, name)]
    assert not private, f"not in docs/public-api.md: {private}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(Path(dualform_paper.__file__).parent)))
def test_it_does_not_reach_into_a_store(path):
    attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not attributes & {"store", "manifest"}


def test_private_imports_are_noticed(tmp_path):
    (tmp_path / "made.py").write_text(
        "import dualform.store.reader\nfrom dualform import query\nfrom dualform.errors import _x\n"
    )
    assert [is_public(*one) for one in imports(tmp_path / "made.py")] == [False, False, False]


def test_the_public_modules_are_there():
    assert len(PUBLIC) > 10
    for module in PUBLIC:
        __import__(module)


def test_both_distributions_have_the_same_version():
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "paper" / "pyproject.toml").read_text(), re.M)
    assert version == dualform.__version__


@pytest.mark.parametrize("group", [plugins.COMMANDS, plugins.RUNS, plugins.VIEWS])
def test_dualform_finds_it(group):
    ours = [entry for entry in plugins.entry_points(group).values() if entry.value.startswith("dualform_paper.")]
    assert len(ours) == 1
    ours[0].load()
