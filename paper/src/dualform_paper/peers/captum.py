"""Captum: TracInCP (Pruthi et al. 2020), gradients compared at checkpoints, here networks rebuilt from the record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualform import Dual
from dualform.evaluate import Study, View
from dualform.progress import Progress
from dualform_paper.peers.samples import BATCH, Loss, Opposite, dataset, moments


def tracin(checkpoints: int = 15) -> View:
    """The sum over so many moments of training; learning rates count as equal."""

    def view(dual: Dual, study: Study, progress: Progress | None = None) -> Tensor:
        from captum.influence import TracInCP

        networks = {str(step): dual.at(step).model().state_dict() for step in moments(dual, checkpoints)}

        def load(model: nn.Module, name: str) -> float:
            model.load_state_dict(networks[name])
            return 1.0

        model: Any = dual.model()
        peer = TracInCP(
            model,
            dataset(dual, study),
            list(networks),
            load,
            loss_fn=Loss(),
            test_loss_fn=Opposite(study),
            batch_size=BATCH,
            sample_wise_grads_per_batch=True,
        )
        found: Tensor = peer.influence((study.inputs, torch.zeros(len(study.judge(model)))))
        return found.detach().double()

    return view
