"""The table of everything measured so far, and its picture, docs/speed.png: ours / peer and ours / limit, and the bars.

python bench/figure.py
"""

from __future__ import annotations

import matplotlib as mpl

from measure import RESULTS, rows, show

mpl.use("Agg")
import matplotlib.pyplot as plt

FIGURE = RESULTS.parents[1] / "docs" / "speed.png"
COLOURS = {"peer": "#1f77b4", "limit": "#d62728"}

if __name__ == "__main__":
    found = rows()
    show(found)
    lines = [(row, name) for row in found for name in row.ratios]
    figure, axis = plt.subplots(figsize=(9, 0.42 * len(lines) + 1), layout="constrained")
    for place, (row, name) in enumerate(reversed(lines)):
        axis.plot([1, row.ratios[name]], [place, place], color="lightgrey", zorder=1)
        axis.plot(row.ratios[name], place, "o", color=COLOURS[row.kinds[name]], zorder=3)
        for bar in row.bars:
            if bar.against == name:
                axis.plot(bar.at_most, place, "|", color="black", markersize=14, zorder=2)
    axis.set_yticks(
        range(len(lines)), [f"{row.work.split(':')[0]}\n/ {name}" for row, name in reversed(lines)], fontsize=6
    )
    axis.set_xscale("log")
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set_xlabel("our time / theirs (blue: a peer, red: a limit); | : what we aim to be left of", fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(FIGURE, dpi=150)
