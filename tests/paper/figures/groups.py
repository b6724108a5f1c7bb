"""The classes that the tests draw."""

from dualform_paper.figures.results import Group

DIGITS = tuple(Group("mnist", label, str(label)) for label in range(10))
CLOTHES = tuple(
    Group("fashion-mnist", label, name)
    for label, name in enumerate(
        ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
    )
)
LONG = tuple(Group("animals", label, f"the greater spotted animal number {label}") for label in range(10))
