"""TRAK (Park et al. 2023): projected gradients of the margin of several models."""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dualform import Dual
from dualform.errors import NotRecordedError
from dualform.evaluate import Margin, Study, View, samples_of
from dualform.progress import Progress
from dualform_paper.peers.samples import dataset

BATCH = 64
SEED = 10**9
"""Of the first model trained here: far from those of the subsets."""


def trak(models: int = 10, size: int = 128) -> View:
    """The recorded model, and others trained by the study on all samples; projections to `size` numbers."""

    def view(dual: Dual, study: Study, progress: Progress | None = None) -> Tensor:
        from trak import TRAKer
        from trak.projectors import BasicProjector, ProjectionType

        if not isinstance(study.target, Margin):
            raise NotRecordedError("TRAK is run on classifiers here: the study's target is not a dualform.Margin.")
        train, ids = dataset(dual, study), samples_of(dual, study)
        model = dual.model()
        networks = [model, *(study.train(ids, SEED + number) for number in range(1, models))]
        with tempfile.TemporaryDirectory() as folder:
            width = sum(parameter.numel() for parameter in model.parameters())
            projector = BasicProjector(
                grad_dim=width,
                proj_dim=size,
                seed=0,
                proj_type=ProjectionType.rademacher,
                device=torch.device("cpu"),
                dtype=torch.float32,
            )
            peer = TRAKer(
                model=model,
                task="image_classification",
                train_set_size=len(train),
                save_dir=folder,
                device="cpu",
                projector=projector,
                proj_dim=size,
                use_half_precision=False,
                logging_level=40,
            )
            for number, network in enumerate(networks):
                peer.load_checkpoint(network.eval().state_dict(), model_id=number)
                for batch in DataLoader(train, BATCH):
                    peer.featurize(batch, num_samples=len(batch[0]))
            peer.finalize_features()
            for number, network in enumerate(networks):
                peer.start_scoring_checkpoint("test", network.state_dict(), number, len(study.target.labels))
                peer.score((study.inputs, study.target.labels), num_samples=len(study.target.labels))
            found = torch.tensor(peer.finalize_scores("test")).double()
        return found.T

    return view
