"""Recorded language models: their text, prompts put to them, and the training passages that they read from.

Nothing is imported here: questions that totals answer need no PyTorch (docs/decisions/0013-passages-without-pytorch.md).
"""
