"""Remark 3.4: how few slots could say what was learned."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dualform_paper.asides.digits import Run
from dualform_paper.section import Section, percent, table
from dualform_paper.settings import LAYERS

RANKS = (1, 2, 3, 4, 6, 8, 9, 10, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Compacted:
    """All layers that have so many directions, compacted to one rank."""

    rank: int
    errors: dict[str, float]
    """‖what is lost‖ / ‖what was learned‖ of each layer that was compacted."""
    accuracy: float


@dataclass(frozen=True)
class Compacting:
    """Rank beside error beside accuracy."""

    slots: int
    accuracy: float
    """As trained."""
    compacted: tuple[Compacted, ...]

    def section(self) -> Section:
        """What is found, in words and as a table."""
        enough = next((c for c in self.compacted if c.accuracy >= self.accuracy - 0.01), self.compacted[-1])
        lost = ", ".join(f"{percent(error)} in layer {name}" for name, error in enough.errors.items())
        nine = next(c for c in self.compacted if c.rank == 9)
        text = (
            f"The best {enough.rank} slots for each layer, in the place of {self.slots:,}, answer within a percent of the trained "
            f"network ({percent(enough.accuracy)} and {percent(self.accuracy)}), although they lose {lost} of what was learned "
            f"(Frobenius norm). The last layer needs 9 at most, for 10 classes (error {nine.errors[LAYERS[-1]]:.0e}): error signals of "
            f"softmax and cross-entropy add up to 0. What is saved is paid for: none of these slots is a training example."
        )
        header = ("rank", *(f"error, layer {name}" for name in LAYERS), "accuracy", "slots saved per layer")
        rows = [
            (
                str(c.rank),
                *(f"{c.errors[name]:.1e}" if name in c.errors else "as trained" for name in LAYERS),
                percent(c.accuracy),
                f"{self.slots - c.rank:,}",
            )
            for c in self.compacted
        ]
        curves = {
            f"error, layer {name}": {
                "x": [c.rank for c in self.compacted if name in c.errors],
                "y": [c.errors[name] for c in self.compacted if name in c.errors],
            }
            for name in LAYERS
        }
        curves["accuracy"] = {"x": [c.rank for c in self.compacted], "y": [c.accuracy for c in self.compacted]}
        return Section(
            "Remark 3.4: a more compact attention system",
            f"{text}\n\n{table(header, rows)}",
            {**asdict(self), "curves": curves, "axes": {"x": "rank", "y": "relative error, or accuracy"}},
        )


def measure(run: Run) -> Compacting:
    """Compact to each rank; a layer with fewer directions than the rank stays as trained."""
    images = run.digits.test_images
    room = {name: min(run.dual.layer(name).initial_weight.shape) for name in LAYERS}
    found = []
    for rank in RANKS:
        if rank <= max(room.values()):
            compact = run.dual.compact(rank, layers=[name for name in LAYERS if room[name] >= rank])
            errors = {name: layer.error for name, layer in compact.items()}
            found.append(Compacted(rank, errors, run.digits.accuracy(compact.model()(images))))
    return Compacting(run.dual.layer(LAYERS[0]).slots, run.digits.accuracy(run.answer(images)), tuple(found))
