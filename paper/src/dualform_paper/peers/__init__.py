"""Other packages for the same question, run on the same recorded network: the extra `dualform[peers]` brings them."""

from __future__ import annotations

import functools
import warnings

from torch import Tensor

from dualform import Dual
from dualform.evaluate import Peer, Study, View
from dualform.progress import Progress
from dualform_paper.peers.captum import tracin
from dualform_paper.peers.kronfluence import kronfluence
from dualform_paper.peers.trak import trak


def _quiet(view: View) -> View:
    """Peers warn of what is theirs."""

    @functools.wraps(view)
    def run(dual: Dual, study: Study, progress: Progress | None) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return view(dual, study, progress)

    return run


PEERS = {
    "kronfluence": Peer("kronfluence", _quiet(kronfluence())),
    "kronfluence-damped": Peer("kronfluence", _quiet(kronfluence(damping=None))),
    "kronfluence-5": Peer("kronfluence", _quiet(kronfluence(checkpoints=5))),
    "tracin": Peer("captum", _quiet(tracin())),
    "trak": Peer("trak", _quiet(trak())),
}
"""kronfluence-damped: by a tenth of the mean eigenvalue, its other choice; kronfluence-5: averaged over five moments of training."""
