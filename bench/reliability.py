"""Write the counts of the campaigns (bench/results/torture-*.json) into docs/reliability.md.

python bench/reliability.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- counts -->", "<!-- end of counts -->"

TITLES = {
    "kill": "Kills",
    "mutate": "Random mutations",
    "structured": "Structured mutations",
    "fuzz": "Differential fuzzing",
    "faults": "Failing system calls",
    "power": "Losses of power",
    "interrupts": "Interrupts",
}
"""The campaigns in the order of the page."""


def counts(results: Path = RESULTS) -> str:
    """The section of the page that holds all counts, as Markdown."""
    lines = [
        "| campaign | counted | failures | explained | hours | last run | version of the code |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    details = []
    for name, title in TITLES.items():
        path = results / f"torture-{name}.json"
        if not path.exists():
            lines.append(f"| {title} | not run yet | | | | | |")
            continue
        data = json.loads(path.read_text())
        unit = data["unit"]
        tested = shown(versions(data), unit)
        lines += [_line(title, unit, version, found) for version, found in tested]
        newest = tested[0][1]
        details += ["", f"**{title}**: {_listed(newest['counts'], unit)}."]
        for _, found in tested:
            details += [f"- {failure}: {cause}" for failure, cause in found.get("explained", {}).items()]
    return "\n".join([*lines, *details])


def shown(tested: list[tuple[str, dict[str, Any]]], unit: str) -> list[tuple[str, dict[str, Any]]]:
    """The versions that have a line: the newest one, and the one that was tested most, if that is another."""
    most = max(tested, key=lambda item: item[1]["counts"].get(unit, 0))
    return [tested[0]] if most is tested[0] else [tested[0], most]


def versions(data: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The versions of the code that were tested and what was counted for each, the last one first."""
    tested: dict[str, dict[str, Any]] = data["versions"]
    return sorted(tested.items(), key=lambda item: (item[1]["last"], item[1].get("order", 0)), reverse=True)


def _line(title: str, unit: str, version: str, found: dict[str, Any]) -> str:
    counted = found["counts"]
    cells = [
        title,
        f"{counted.get(unit, 0):,} {unit}",
        f"{counted.get('failures', 0):,}",
        f"{len(found.get('explained', {})):,}",
        f"{found['seconds'] / 3600:.1f}",
        found["last"],
        f"`{version}` of {found['dualform']}",
    ]
    return f"| {' | '.join(cells)} |"


def _listed(counted: dict[str, int], unit: str) -> str:
    others = {name: count for name, count in counted.items() if name not in (unit, "failures")}
    return "; ".join(f"{name} {count:,}" for name, count in others.items())


def page(text: str, results: Path = RESULTS) -> str:
    """The page with the present counts in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{counts(results)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
