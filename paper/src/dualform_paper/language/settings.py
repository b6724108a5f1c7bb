"""What decides the outcome of a language experiment."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from dualform.errors import QuestionError
from dualform.language.shape import Shape


@dataclass(frozen=True)
class Settings:
    """One training: everything that replays it, except the text itself."""

    embedding: int
    state: int
    batch: int
    """Rows of a batch: places of the text that are read side by side."""
    steps: int
    lr: float
    clip: float
    """Gradients are clipped to this norm, over all parameters together."""
    weight_decay: float = 0.0
    dropout: float = 0.0
    """Dropout of the embeddings, before the linear map if there is one."""
    between: int = 0
    """Width of a linear map between embedding and LSTM; 0: none."""
    window: int = 100
    """Tokens that a row reads in one step; gradients go back to the first of them."""
    forget: float = 0.01
    """The probability that the state carried over from the step before is dropped."""
    predicted: float = 1.0
    """The share of tokens, drawn anew in each step, whose next token the loss is about. The LSTM reads all of them. With a large
    vocabulary the output layer takes nearly all of the time."""
    seed: int = 0
    preset: str = "text"
    """The name of the preset that these settings come from."""
    output_dropout: float = 0.0
    """Dropout of the LSTM's output."""
    embedding_range: float | None = None
    """Embeddings are initialised uniformly within ± this; None: from N(0, 1), PyTorch's default."""
    epochs: bool = False
    """Whether every pass over the text begins at the same places, without state. Otherwise rows read on past the end of the text."""
    forget_together: bool = False
    """Whether all rows drop their state at once, or each row by itself."""

    def shape(self, vocabulary: int) -> Shape:
        """The sizes of the model."""
        return Shape(vocabulary, self.embedding, self.state, self.dropout, self.between, self.output_dropout)

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch * self.window

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots of one step in float16: keys and the gates' error signals, with an exponent each."""
        return 2 * self.tokens * (self.shape(0).key + 4 * self.state + 2)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


PRESETS = ("released", "text")
"""As the authors' code trains; as the paper's text says, and PyTorch's defaults where it is silent."""
SIZES = ("paper", "small")
"""The paper's models; models that train in minutes."""
SHARED = {
    ("aesop", "paper"): Settings(embedding=64, state=1024, batch=64, steps=5000, lr=1e-3, clip=1.0),
    ("aesop", "small"): Settings(embedding=32, state=128, batch=32, steps=600, lr=3e-3, clip=1.0),
    ("wikitext-2", "paper"): Settings(
        embedding=200, state=200, batch=128, steps=10_000, lr=3e-3, clip=0.3, weight_decay=1e-7, dropout=0.5
    ),
    ("wikitext-2", "small"): Settings(
        embedding=64, state=64, batch=16, steps=300, lr=3e-3, clip=0.3, weight_decay=1e-7, dropout=0.1
    ),
}
"""By text and size: what both presets share."""


def settings_for(
    text: str,
    size: str = "paper",
    *,
    preset: str = "released",
    steps: int | None = None,
    state: int | None = None,
    seed: int = 0,
    predicted: float = 1.0,
) -> Settings:
    """The settings of an experiment. state: width of the LSTM, if not the preset's."""
    if not 0 < predicted <= 1:
        raise QuestionError(f"predicted {predicted:g}: expected a share of the tokens, above 0 and up to 1.")
    if preset not in PRESETS:
        raise QuestionError(f"preset {preset!r}: expected one of {', '.join(PRESETS)}.")
    if (text, size) not in SHARED:
        known = ", ".join(" ".join(names) for names in SHARED)
        raise QuestionError(f"there are no settings for {text} {size}; expected one of {known}.")

    for name, value in (("steps", steps), ("state", state)):
        if value is not None and value < 1:
            raise QuestionError(f"{name} {value}: expected at least 1.")

    settings = replace(SHARED[text, size], seed=seed, predicted=predicted, preset=preset)
    if steps is not None:
        settings = replace(settings, steps=steps)
    if state is not None:
        settings = replace(settings, state=state)

    if preset == "text":
        return replace(settings, output_dropout=settings.dropout)
    return replace(
        settings,
        weight_decay=1e-7,
        embedding_range=0.1,
        # The authors' code maps embeddings to the width of the LSTM where a size of the embedding is given, as for Aesop.
        between=settings.state if text == "aesop" else 0,
        epochs=True,
        forget_together=True,
    )


@dataclass(frozen=True)
class Order:
    """What a person asks for on the command line."""

    preset: str = "released"
    size: str = "paper"
    steps: int | None = None
    state: int | None = None
    seed: int = 0
    minutes: float | None = None
    predicted: float = 1.0
    all_slots: bool = False

    def settings(self, text: str) -> Settings:
        """The settings of the training."""
        return settings_for(
            text,
            self.size,
            preset=self.preset,
            steps=self.steps,
            state=self.state,
            seed=self.seed,
            predicted=self.predicted,
        )

    def folder(self, text: str) -> str:
        """The name of the results' folder: presets, sizes and seeds have one each."""
        parts = [text, self.preset]
        if self.size != "paper":
            parts.append(self.size)
        if self.seed:
            parts.append(f"seed-{self.seed}")
        return "-".join(parts)

    def command(self, text: str) -> str:
        """The command line, without defaults and without what changes nothing in the results."""
        options = {
            "--preset": self.preset,
            "--size": self.size if self.size != "paper" else None,
            "--steps": self.steps,
            "--state-size": self.state,
            "--seed": self.seed or None,
            "--minutes": self.minutes,
            "--predicted": self.predicted if self.predicted != 1 else None,
        }
        words = [f"{option} {value}" for option, value in options.items() if value is not None]
        if self.all_slots:
            words.append("--slots")
        return " ".join(["dualform paper", text, *words])
