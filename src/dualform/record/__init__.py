"""Recording: hooks capture, the ledger counts, the audit proves, the writer stores."""

from dualform.record.recorder import Recorder, record

__all__ = ["Recorder", "record"]
