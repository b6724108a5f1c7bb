"""Other packages for the same question, run on the same recorded network: the `bench` extra brings them."""

from __future__ import annotations

import functools
import warnings
from importlib.util import find_spec

from torch import Tensor

from dualform.dual.certificate import Progress
from dualform.evaluate.peers.captum import tracin
from dualform.evaluate.peers.kronfluence import kronfluence
from dualform.evaluate.peers.trak import trak
from dualform.evaluate.study import Study
from dualform.evaluate.views import View
from dualform.query.opened import Dual


def _quiet(view: View) -> View:
    """Peers warn of what is theirs."""

    @functools.wraps(view)
    def run(dual: Dual, study: Study, progress: Progress | None) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return view(dual, study, progress)

    return run


PEERS: dict[str, View] = {
    "kronfluence": _quiet(kronfluence()),
    "kronfluence-damped": _quiet(kronfluence(damping=None)),
    "kronfluence-5": _quiet(kronfluence(checkpoints=5)),
    "tracin": _quiet(tracin()),
    "trak": _quiet(trak()),
}
"""kronfluence-damped: by a tenth of the mean eigenvalue, its other choice; kronfluence-5: averaged over five moments of training."""
PACKAGES = {name: "captum" if name == "tracin" else name.split("-")[0] for name in PEERS}


def installed() -> list[str]:
    """The peers whose package is there."""
    return [name for name, package in PACKAGES.items() if find_spec(package) is not None]
