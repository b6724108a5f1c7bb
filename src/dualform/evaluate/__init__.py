"""Judging a run's answers by training again: do they say what would change?"""

from dualform.evaluate.evaluation import evaluate
from dualform.evaluate.study import LogLikelihood, Margin, Study

__all__ = ["LogLikelihood", "Margin", "Study", "evaluate"]
