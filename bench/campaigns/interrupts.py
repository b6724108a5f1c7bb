"""Interrupt a recording at a random line of dualform's own code (bench/interrupts.py), by an exception or by SIGINT, once or twice."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import interrupts
from campaigns.case import Campaign as Base
from campaigns.case import Outcome
from dualform.errors import DualformError


class Campaign(Base):
    """Each case is one interrupt."""

    name = "interrupts"
    unit = "interrupts"
    goal = 2_000

    def __init__(self, folder: Path):
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell starts what runs in the background without it

    def run(self, draw: random.Random, number: int) -> Outcome:
        """Interrupt a training, and check what is left."""
        scenario = draw.choice(list(interrupts.SCENARIOS))
        kind = draw.choice(interrupts.KINDS)
        outcome = Outcome()
        with interrupts.small_stretches():
            lines = interrupts.executed_lines(scenario)
            at = draw.randint(1, len(lines.places))
            then_at = draw.randint(1, lines.closing)
            try:
                left = interrupts.trial(interrupts.SCENARIOS[scenario], kind, at, then_at)
            except (AssertionError, DualformError) as error:
                outcome.fail(f"{scenario}, {kind} at {at}, {then_at}: {error}")
            else:
                outcome.counts[left] += 1
        outcome.counts[self.unit] += 1
        outcome.counts[f"{scenario}, {kind}"] += 1
        return outcome
