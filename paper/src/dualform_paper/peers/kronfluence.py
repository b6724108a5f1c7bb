"""kronfluence: EK-FAC influence functions (Grosse et al. 2023) with its default settings."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dualform import Dual
from dualform.errors import NotRecordedError
from dualform.evaluate import Study, View, call
from dualform.progress import Progress
from dualform_paper.peers.samples import BATCH, Opposite, dataset, loss, moments, standardised

TRACKED = (nn.Linear, nn.Conv2d)
"""What kronfluence sees of a model, where it is trained."""


def kronfluence(checkpoints: int = 1, damping: float | None = 1e-8) -> View:
    """Of the final network, or the mean over some moments of training (our averaging, on networks rebuilt from the record).

    damping: its damping_factor; None is a tenth of the mean eigenvalue.
    """

    def view(dual: Dual, study: Study, progress: Progress | None = None) -> Tensor:
        steps = moments(dual, checkpoints)
        scores = [_scores(dual.at(step).model(), dual, study, damping) for step in steps]
        return scores[0] if len(scores) == 1 else torch.stack([standardised(one) for one in scores]).mean(0)

    return view


def _scores(model: nn.Module, dual: Dual, study: Study, damping: float | None) -> Tensor:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    tracked = [name for name, module in model.named_modules() if _is_tracked(module)]
    if not tracked:
        raise NotRecordedError("kronfluence sees Linear and Conv2d only, and this model trains none.")
    judged = Opposite(study)

    class Training(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            if not sample:
                return loss(logits, batch[1])
            flat = logits.flatten(0, -2)
            drawn = torch.multinomial(F.softmax(flat.detach(), -1), 1)[:, 0]
            return loss(flat, drawn)

        def get_influence_tracked_modules(self) -> list[str]:
            return tracked

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            found: Tensor = judged(call(model, study.inputs))
            return found

    task = Training()
    train = dataset(dual, study)
    examples = len(study.judge(model))
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        analyzer = Analyzer(
            "run", prepare_model(model.eval(), task), task, cpu=True, disable_tqdm=True, log_level=40, output_dir=folder
        )
        analyzer.fit_all_factors("factors", train, per_device_batch_size=BATCH, factor_args=FactorArguments())
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            TensorDataset(torch.arange(examples)),
            train,
            per_device_query_batch_size=examples,
            per_device_train_batch_size=BATCH,
            score_args=ScoreArguments(damping_factor=damping),
        )
        found: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    return found.double()


def _is_tracked(module: nn.Module) -> bool:
    """Whether a module is trained: the base under adapters is not."""
    return type(module) in TRACKED and any(parameter.requires_grad for parameter in module.parameters())
