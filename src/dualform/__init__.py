"""Record how a PyTorch network is trained; then ask, exactly, where a prediction comes from."""

import importlib
import sys
import types
import typing

from dualform import (
    errors,
    forked,  # noqa: F401  (imported before Polars, so that it can tell whether somebody else has done so, perhaps before a fork)
)
from dualform.version import __version__

if typing.TYPE_CHECKING:
    from dualform.dual.layer import DualLayer
    from dualform.evaluate import LogLikelihood, Margin, Study, evaluate
    from dualform.query.dual import Dual, open
    from dualform.record import Recorder, collect, estimate, record
    from dualform.store.copying import copy
    from dualform.totals.build import build_totals

__all__ = [
    "Dual",
    "DualLayer",
    "LogLikelihood",
    "Margin",
    "Recorder",
    "Study",
    "__version__",
    "build_totals",
    "collect",
    "copy",
    "errors",
    "estimate",
    "evaluate",
    "open",
    "record",
]

_ROOMS = {
    "dualform.dual.layer": ("DualLayer",),
    "dualform.evaluate": ("LogLikelihood", "Margin", "Study", "evaluate"),
    "dualform.query.dual": ("Dual", "open"),
    "dualform.record": ("Recorder", "collect", "estimate", "record"),
    "dualform.store.copying": ("copy",),
    "dualform.totals.build": ("build_totals",),
}
"""Where the public names live. A room is entered when one of its names is used: PyTorch takes longer to import than some questions take."""
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}


class _Door(types.ModuleType):
    """This package: a name that it shares with a room (`record`, `evaluate`) is the function, whoever imports the room first."""

    def __getattr__(self, name: str) -> typing.Any:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: typing.Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Door
