"""Attention summed by class, with the true class and the model's answer marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from dualform.figures.colours import INK, colour_of
from dualform.figures.sheet import write
from dualform_paper.figures.partition import Partition, class_of
from dualform_paper.figures.results import Group, LayerTotals
from dualform_paper.figures.scales import reach, ticks, y_label
from dualform_paper.figures.stack import PANEL, stack

BAR = 0.78
"""A bar's width, in widths of a class."""


def save(
    layers: Sequence[LayerTotals],
    title: str,
    stem: Path,
    *,
    target: Group,
    answer: Group,
    quantity: str | None = None,
) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg. quantity: what is summed, if not attention weights."""
    return write(lambda: draw(layers, title, target=target, answer=answer, quantity=quantity), stem)


def draw(
    layers: Sequence[LayerTotals], title: str, *, target: Group, answer: Group, quantity: str | None = None
) -> Figure:
    """One panel for each layer."""
    partition = Partition(group for layer in layers for group in layer.groups)
    note = f"▼ true class: {class_of(target)}      ▽ answer: {class_of(answer)}"
    names = [layer.layer for layer in layers]
    figure, panels = stack(names, partition, title, "class of the training examples", note=note)
    for axes, layer in zip(panels, layers, strict=True):
        _bars(axes, layer, partition)
        _mark(axes, layer, partition, target, filled=True, aside=-0.06 * (target == answer))
        _mark(axes, layer, partition, answer, filled=False, aside=0.06 * (target == answer))
        y_label(axes, quantity or _summed(layer), PANEL)
    return figure


def _summed(layer: LayerTotals) -> str:
    return "sum of |weights|" if layer.absolute else "sum of weights"


def _bars(axes: Any, layer: LayerTotals, partition: Partition) -> None:
    for group, total in zip(layer.groups, layer.totals, strict=True):
        place = partition.places[group]
        axes.bar(place, total, width=BAR, **partition.style(group))
        axes.bar(place, total, width=BAR, fill=False, edgecolor=colour_of(group.label), linewidth=0.8)
    reach(axes, min(layer.totals, default=0.0), max(layer.totals, default=0.0), 0.14)
    ticks(axes.yaxis)


def _mark(axes: Any, layer: LayerTotals, partition: Partition, group: Group, *, filled: bool, aside: float) -> None:
    """A triangle above the bar; `aside` in inches."""
    if group not in layer.groups:
        return
    height = max(layer.totals[layer.groups.index(group)], 0.0)
    beside = axes.transData + ScaledTranslation(aside, 0.07, axes.figure.dpi_scale_trans)
    axes.plot(
        partition.places[group],
        height,
        marker="v",
        markersize=5,
        color=INK,
        markerfacecolor=INK if filled else "white",
        markeredgewidth=0.8,
        transform=beside,
        clip_on=False,
    )
