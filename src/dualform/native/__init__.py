"""Loops in C, for those who have a compiler."""
