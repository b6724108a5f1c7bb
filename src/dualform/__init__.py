"""Record how a PyTorch network is trained; then ask, exactly, where a prediction comes from."""

from dualform import errors
from dualform.evaluate import LogLikelihood, Margin, Study, evaluate
from dualform.query.opened import Dual, open
from dualform.record import Recorder, record
from dualform.totals.build import build_totals
from dualform.version import __version__

__all__ = [
    "Dual",
    "LogLikelihood",
    "Margin",
    "Recorder",
    "Study",
    "__version__",
    "build_totals",
    "errors",
    "evaluate",
    "open",
    "record",
]
