"""One colour for each class, the same in every figure."""

from __future__ import annotations

CLASSES = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933",
    "#DDCC77", "#CC6677", "#882255", "#AA4499", "#7A7A7A",
)  # fmt: skip
"""Paul Tol's "muted" scheme and a grey: told apart with every kind of colour vision."""
SERIES = ("#0077BB", "#EE7733", "#009988", "#EE3377", "#BBBBBB", "#CC3311", "#33BBEE")
"""What is compared and is no class: Paul Tol's "vibrant" scheme, apart from the classes' colours."""
INITIAL = "#222222"
"""The initial part: what was there before any training example."""
INK, FAINT, RULE, GROUND = "#1B1F24", "#6B7280", "#D5D9DF", "#FFFFFF"
"""Text; what should stand back; lines between blocks; the ground everything stands on."""
RIGHT_INK, WRONG_INK = "#117733", "#B0304A"
"""The words "right" and "wrong"."""


def colour_of(label: int) -> str:
    """The colour of a class; beyond ten they repeat, so a label is always written beside its colour."""
    return CLASSES[label % len(CLASSES)]


def ink_on(label: int) -> str:
    """Black or white, whichever can be read on a class's colour."""
    red, green, blue = (int(colour_of(label)[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else GROUND
