"""Judging a run's answers by training again: do they say what would change?"""

from dualform.evaluate.evaluation import evaluate
from dualform.evaluate.study import LogLikelihood, Margin, Study, call
from dualform.evaluate.views import Peer, View, samples_of

__all__ = ["LogLikelihood", "Margin", "Peer", "Study", "View", "call", "evaluate", "samples_of"]
