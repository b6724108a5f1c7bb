"""The paper's remarks and asides, each as a small experiment on digits."""

from __future__ import annotations

from pathlib import Path

from dualform.progress import Progress
from dualform_paper.asides import compacting, kernels, limits, machine, orthogonal, rerun, softmax
from dualform_paper.asides.digits import Settings, prepare
from dualform_paper.section import Section

__all__ = ["Settings", "run"]


def run(
    folder: Path,
    progress: Progress | None = None,
    *,
    settings: Settings = Settings(),  # noqa: B008
    kernel_epochs: int = 6,
) -> tuple[Section, ...]:
    """Record one training into a folder, then a section for each remark. A recording in the folder is replaced.

    kernel_epochs: how long the networks of remark 3.2 learn; they get slower with all that they have seen.
    """
    recorded = prepare(folder, settings, progress)
    return (
        softmax.measure(recorded).section(),
        kernels.measure(recorded, kernel_epochs, progress).section(),
        orthogonal.measure(recorded).section(),
        compacting.measure(recorded).section(),
        machine.measure(recorded).section(),
        rerun.measure(recorded).section(),
        limits.section(),
    )
