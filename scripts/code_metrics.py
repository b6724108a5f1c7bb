"""Print how dense the core is: tokens, tokens per line of code, functions with many branches. It informs, it does not fail.

    python scripts/code_metrics.py [--files]

The core is everything in `src` but figures, language, evaluation, the page, the command line and the demo. Docstrings, comments and blank lines do
not count. Goals: at most 105,000 tokens, 9 per line, 30 functions with a complexity above 10.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "dualform"
OUTSIDE = {"integrations", "figures", "language", "evaluate", "explorer", "cli", "demo", "terminal"}
MANY_BRANCHES = 10
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.match_case)


@dataclass(frozen=True)
class Metrics:
    """What one file counts."""

    path: Path
    tokens: int
    lines: int
    branching: tuple[tuple[str, int], ...]
    """Functions with a complexity above MANY_BRANCHES, with it."""


def measure(path: Path) -> Metrics:
    """Count the tokens and lines of code of a file, and its functions with many branches."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = _docstring_starts(tree)
    per_line: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or token.start in docstrings:
            continue
        line = token.start[0]
        per_line[line] = per_line.get(line, 0) + 1
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    complexities = [(function.name, complexity(function)) for function in functions]
    branching = tuple(pair for pair in complexities if pair[1] > MANY_BRANCHES)
    return Metrics(path, sum(per_line.values()), len(per_line), branching)


def complexity(function: ast.AST) -> int:
    """McCabe's number: one, and one more for each branch and each further operand of `and` and `or`."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
    return total


def _docstring_starts(tree: ast.Module) -> set[tuple[int, int]]:
    """Where strings stand that are statements: docstrings, and those below an attribute."""
    return {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def core_files() -> list[Path]:
    """The files of the core."""
    every = sorted(PACKAGE.rglob("*.py"))
    return [path for path in every if path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in OUTSIDE]


def main() -> None:
    """Print the figures of the core, and with --files those of each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--files", action="store_true", help="each file, the densest first, and each branching function"
    )
    arguments = parser.parse_args()
    found = [measure(path) for path in core_files()]
    tokens = sum(one.tokens for one in found)
    lines = sum(one.lines for one in found)
    branching = sum(len(one.branching) for one in found)
    print(
        f"core: {tokens:,} tokens in {len(found)} files, {tokens / lines:.1f} per line of code, "
        f"{branching} functions with a complexity above {MANY_BRANCHES}"
    )
    if not arguments.files:
        return
    for one in sorted(found, key=lambda one: -one.tokens / max(one.lines, 1)):
        name = one.path.relative_to(PACKAGE)
        functions = ", ".join(f"{function} {number}" for function, number in one.branching)
        print(f"{one.tokens / max(one.lines, 1):6.1f} {one.tokens:6d}  {name}  {functions}")


if __name__ == "__main__":
    main()
