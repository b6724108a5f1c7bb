"""Attention weights over training examples: for each class its highest, in descending order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dualform.figures.colours import colour_of
from dualform.figures.sheet import write
from dualform_paper.figures.partition import Partition
from dualform_paper.figures.results import LayerCurves
from dualform_paper.figures.scales import reach, ticks, y_label
from dualform_paper.figures.stack import PANEL, stack

FILLED = 0.9
"""How much of a class's width the curve with the most weights takes."""
POINTS = 80
"""Of a curve, at most: they are closest where it is steepest, and the SVG stays small."""


def save(layers: Sequence[LayerCurves], title: str, stem: Path) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg."""
    return write(lambda: draw(layers, title), stem)


def draw(layers: Sequence[LayerCurves], title: str) -> Figure:
    """One panel for each layer."""
    partition = Partition(group for layer in layers for group in layer.groups)
    most = max((len(weights) for layer in layers for weights in layer.weights), default=0)
    x_label = f"training examples by class: of each class the {most} highest, in descending order"
    figure, panels = stack([layer.layer for layer in layers], partition, title, x_label)
    for axes, layer in zip(panels, layers, strict=True):
        _curves(axes, layer, partition, most)
    return figure


def _curves(axes: Any, layer: LayerCurves, partition: Partition, most: int) -> None:
    for group, weights in zip(layer.groups, layer.weights, strict=True):
        if not len(weights):
            continue
        shown = np.unique(((len(weights) - 1) * np.linspace(0, 1, POINTS) ** 2).round().astype(int))
        across = partition.places[group] + FILLED * (shown / most - 0.5)
        axes.fill_between(across, weights[shown], **partition.style(group))
        axes.plot(across, weights[shown], color=colour_of(group.label), linewidth=0.8)
    present = [weights for weights in layer.weights if len(weights)]
    reach(axes, min((w.min() for w in present), default=0.0), max((w.max() for w in present), default=0.0), 0.04)
    ticks(axes.yaxis)
    y_label(axes, "attention weight\n(key · query)", PANEL)
