"""What decides the outcome of a language experiment."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from dualform.errors import QuestionError
from dualform.paper.language.shape import Shape


@dataclass(frozen=True)
class Settings:
    """One training: everything that replays it, except the text itself."""

    embedding: int
    state: int
    batch: int
    """So many places of the text are read side by side."""
    steps: int
    lr: float
    clip: float
    """The largest norm of all gradients together."""
    weight_decay: float = 0.0
    dropout: float = 0.0
    between: int = 0
    """Width of a linear map between embedding and LSTM; 0: none."""
    window: int = 100
    """Gradients go back over so many tokens."""
    forget: float = 0.01
    """The state that a row carries into the next step is dropped with this probability."""
    predicted: float = 1.0
    """The share of tokens, drawn anew in each step, that the loss is about; the LSTM reads all of them. With a large vocabulary
    the output layer takes nearly all of the time."""
    seed: int = 0

    def shape(self, vocabulary: int) -> Shape:
        """The sizes of the model."""
        return Shape(vocabulary, self.embedding, self.state, self.dropout, self.between)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.window

    @property
    def slot_bytes(self) -> int:
        """That all slots of a step take in float16: keys, and the gates' error signals, with an exponent each."""
        return 2 * self.tokens * (self.shape(0).key + 4 * self.state + 2)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


PRESETS = {
    # The paper's sizes, trained as the authors' code does
    ("aesop", "paper"): Settings(64, 1024, 64, 5000, 1e-3, 1.0),
    ("wikitext-2", "paper"): Settings(200, 200, 128, 10_000, 3e-3, 0.3, weight_decay=1e-7, dropout=0.5),
    # These train in minutes
    ("aesop", "small"): Settings(32, 128, 32, 600, 3e-3, 1.0),
    ("wikitext-2", "small"): Settings(64, 64, 16, 300, 3e-3, 0.3, weight_decay=1e-7, dropout=0.1),
}
SIZES = ("paper", "small")


def settings_for(
    text: str,
    size: str = "paper",
    *,
    steps: int | None = None,
    state: int | None = None,
    seed: int = 0,
    predicted: float = 1.0,
) -> Settings:
    """The settings of an experiment. state: width of the LSTM, if not the preset's."""
    if not 0 < predicted <= 1:
        raise QuestionError(f"predicted {predicted:g}: expected a share of the tokens, above 0 and up to 1.")
    if (text, size) not in PRESETS:
        known = ", ".join(" ".join(names) for names in PRESETS)
        raise QuestionError(f"there is no preset {text} {size}; expected one of {known}.")
    found = replace(PRESETS[text, size], seed=seed, predicted=predicted)
    for what, value in (("steps", steps), ("state", state)):
        if value is not None and value < 1:
            raise QuestionError(f"{what} {value}: expected at least 1.")
        found = found if value is None else replace(found, **{what: value})
    return found
