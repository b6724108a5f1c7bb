"""The tail-patch test (Chang et al. 2024): one more gradient step on the passages retrieved. Does the query's target rise?"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import polars as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.errors import QuestionError
from dualform.evaluate.bm25 import bm25
from dualform.evaluate.fewer import RANDOM
from dualform.evaluate.lds import mean_interval
from dualform.evaluate.scored import chosen, scored
from dualform.evaluate.study import Study
from dualform.evaluate.views import samples_of
from dualform.progress import Progress
from dualform.query.dual import Dual, open


def tail_patch(
    run: str | os.PathLike[str] | Dual,
    study: Study,
    k: int = 10,
    *,
    lr: float = 0.1,
    views: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """One line for each view, and for BM25 and random passages: by how much one step on the k passages raises the target.

    A mean over the test examples with its 95 % bootstrap interval, and the share of examples whose target rises. The step is one
    of plain SGD on the final network, with the mean cross-entropy of the passages as its loss.
    """
    dual = run if isinstance(run, Dual) else open(run, study.model)
    if study.samples is None:
        raise QuestionError("the tail-patch test trains on the passages themselves: give the study samples=.")
    ids = samples_of(dual, study)
    inputs, labels = study.samples(ids)
    if not isinstance(inputs, Tensor) or not isinstance(study.inputs, Tensor) or inputs.is_floating_point():
        raise QuestionError("the tail-patch test is for language runs: inputs are tensors of word numbers.")
    if not 1 <= k <= len(ids):
        raise QuestionError(f"k={k}: expected a number from 1 to {len(ids)}.")
    shuffled = torch.rand(len(study.inputs), len(ids), generator=torch.Generator().manual_seed(0))
    scores = {RANDOM: shuffled, "bm25": bm25(study.inputs, inputs)}
    for found in scored(chosen(views, study), dual, study, progress):
        if found.scores is not None:
            scores[found.view] = found.scores
    model = dual.model()
    before = study.judge(model)
    lines = []
    for done, (name, one) in enumerate(scores.items()):
        if progress is not None:
            progress("patching", done, len(scores))
        best = one.topk(k, dim=1).indices
        rises = torch.stack(
            [
                study.judge(_patched(model, inputs[places], labels[places], lr))[query] - before[query]
                for query, places in enumerate(best)
            ]
        )
        rise = mean_interval(rises)
        share = float((rises > 0).double().mean())
        lines.append({"view": name, "rise": rise.value, "low": rise.low, "high": rise.high, "share": share})
    return pl.DataFrame(lines)


def _patched(model: nn.Module, inputs: Tensor, labels: Tensor, lr: float) -> nn.Module:
    patched = copy.deepcopy(model)
    optimizer = torch.optim.SGD(patched.parameters(), lr=lr)
    optimizer.zero_grad()
    loss = F.cross_entropy(patched(inputs).flatten(0, -2), labels.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return patched
