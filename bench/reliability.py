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
    lines = ["| campaign | counted | failures | hours | last run | version of the code |", "|---|---|--:|--:|---|---|"]
    details = []
    for name, title in TITLES.items():
        path = results / f"torture-{name}.json"
        if not path.exists():
            lines.append(f"| {title} | not run yet | | | | |")
            continue
        version, found = newest(json.loads(path.read_text()))
        unit = found["unit"]
        counted = found["counts"]
        hours = found["seconds"] / 3600
        lines.append(
            f"| {title} | {counted.get(unit, 0):,} {unit} | {counted.get('failures', 0):,} | {hours:.1f} | {found['last']} "
            f"| `{version}` of {found['dualform']} |"
        )
        details += ["", f"**{title}**: {_listed(counted, unit)}."]
    return "\n".join([*lines, *details])


def newest(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The version of the code that was tested last, and what was counted for it."""
    version: str = max(
        data["versions"], key=lambda name: (data["versions"][name]["last"], data["versions"][name]["seconds"])
    )
    return version, {"unit": data["unit"], **data["versions"][version]}


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
