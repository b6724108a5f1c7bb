"""Recording: hooks capture, passes collect, the audit proves, the writer stores."""

from dualform.record.begin import record
from dualform.record.collect import collect
from dualform.record.estimate import estimate
from dualform.record.recorder import Recorder

__all__ = ["Recorder", "collect", "estimate", "record"]
