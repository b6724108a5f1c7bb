"""A tiny text, and a language model that trains on it in a moment."""

from dataclasses import replace

from dualform_paper.language.settings import settings_for

STORY = (
    "“Don’t,” said the Crow — 🧀 naïve\nThe fox saw the crow and the cheese.\nA lamb drank at a little distance.\n"
    "The wolf stood high up the stream.\nThe crow let the cheese fall.\n"
)
SETTINGS = replace(settings_for("aesop", "small", preset="text", state=8), embedding=6, batch=4, window=10, steps=18)
RELEASED = replace(settings_for("aesop", "small", state=8), embedding=6, batch=4, window=10, steps=18)
