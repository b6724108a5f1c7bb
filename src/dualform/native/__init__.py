"""Loops in C, compiled where there is a compiler. Each has a plain equivalent in Python."""
