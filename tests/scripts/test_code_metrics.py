"""The figures that `make check` prints."""

import ast
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "code_metrics.py"
metrics = runpy.run_path(str(SCRIPT))

SOURCE = '''
"""A docstring does not count."""

# nor does a comment
width = 3


def larger(numbers, limit):
    """Nor this."""
    return [number for number in numbers if number > limit and number > width]
'''


def test_tokens_and_lines_of_code(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    found = metrics["measure"](path)
    assert found.lines == 3
    assert found.tokens == 3 + 8 + 16
    assert found.branching == ()


def test_complexity_counts_branches_and_operands():
    function = ast.parse(SOURCE).body[-1]
    assert metrics["complexity"](function) == 3  # itself, the comprehension, one `and`


def test_functions_with_many_branches_are_listed(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f(x):\n" + "    if x: return 1\n" * 10)
    assert metrics["measure"](path).branching == (("f", 11),)


def test_the_core_leaves_the_paper_and_the_page_out():
    parts = {path.relative_to(metrics["PACKAGE"]).parts[0] for path in metrics["core_files"]()}
    assert {"record", "store", "query", "dual"} <= parts
    assert not parts & {"paper", "explorer", "cli", "figures"}
