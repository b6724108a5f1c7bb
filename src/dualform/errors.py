"""Every error that dualform raises on purpose. Each is also the builtin that fits.

DualformError
├── RecordingError (RuntimeError)          something in the training loop does not fit
│   ├── BatchError (ValueError)            recorder.batch(): columns, row counts, a missing call
│   ├── AxisError (ValueError)             which axis of a layer's input are the rows?
│   ├── OptimizerError (TypeError)         an optimizer that cannot be replayed
│   └── UnexplainedError                   the audit: the recorded slots do not explain what happened
├── StoreError (OSError)                   the folder on disk
│   ├── StoreExistsError (FileExistsError)
│   ├── StoreMissingError (FileNotFoundError)
│   ├── StorePermissionError (PermissionError)
│   ├── StoreDamagedError                  truncated, altered, foreign, absent or inconsistent files
│   ├── StoreChangedError                  resumed, overwritten or removed since it was opened
│   ├── StoreVersionError                  written by a newer format
│   └── WriterError                        writing failed (a full disk, …)
├── ForkedError (RuntimeError)             a forked process in which Polars would wait for ever
├── DataError (OSError)                    a dataset is missing, or not what it should be
├── StudyError (ValueError)                evaluate: how to train again, or what to judge by, does not fit
├── WorkersLostError (RuntimeError)        worker processes died while they answered a question
└── QuestionError (ValueError)             a question that makes no sense as asked
    ├── MaskError                          where=, keep= or drop= is not a condition on the rows
    ├── UnknownLayerError (LookupError)
    ├── ModelMismatchError                 the model is not the one that was recorded
    └── NotRecordedError (LookupError)     the store does not hold what the question needs

InexactWarning (UserWarning)               an answer about a layer that was marked as inexact
"""


class DualformError(Exception):
    """The root of the tree: catches everything dualform raises on purpose."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError and OSError would quote or split it


class RecordingError(DualformError, RuntimeError):
    """Something in the training loop does not fit what is being recorded."""


class BatchError(RecordingError, ValueError):
    """recorder.batch() was given columns that do not fit, or was not called."""


class AxisError(RecordingError, ValueError):
    """It is not clear which axis of a layer's input are the rows."""


class OptimizerError(RecordingError, TypeError):
    """The optimizer's update cannot be replayed as a linear recursion."""


class UnexplainedError(RecordingError):
    """The recorded slots do not explain a parameter's gradient or movement."""


class StoreError(DualformError, OSError):
    """Something is wrong with the folder on disk."""


class StoreExistsError(StoreError, FileExistsError):
    """The folder already holds something."""


class StoreMissingError(StoreError, FileNotFoundError):
    """There is no store at this path."""


class StorePermissionError(StoreError, PermissionError):
    """The system does not allow the store to be read or written."""


class StoreDamagedError(StoreError):
    """A file of the store is truncated, altered, foreign or absent, or does not fit the others."""


class StoreChangedError(StoreError):
    """The store was resumed, overwritten or removed after it was opened; open it again."""


class StoreVersionError(StoreError):
    """The store was written by a newer format than this version reads."""


class WriterError(StoreError):
    """Writing failed; what was sealed before stays readable."""


class ForkedError(DualformError, RuntimeError):
    """This process was forked from one that had used Polars, whose threads do not survive a fork."""


class DataError(DualformError, OSError):
    """A dataset of the paper is missing, or not what it should be."""


class StudyError(DualformError, ValueError):
    """How a run is to be trained again, or what it is judged by, does not fit."""


class WorkersLostError(DualformError, RuntimeError):
    """Worker processes died again and again while they answered a question."""


class QuestionError(DualformError, ValueError):
    """A question that cannot be answered as it was asked."""


class MaskError(QuestionError):
    """A mask is not a condition on rows, steps or positions."""


class UnknownLayerError(QuestionError, LookupError):
    """No recorded layer has this name."""


class ModelMismatchError(QuestionError):
    """The model does not have the parameters that were recorded."""


class NotRecordedError(QuestionError, LookupError):
    """The store does not hold what this question needs."""


class InexactWarning(UserWarning):
    """An answer about a layer whose slots do not explain it from some step on (on_unexplained="mark")."""
