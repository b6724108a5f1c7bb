"""How well planted wrong labels are found: the area under the ROC curve of `dual.mislabelled()`."""

from __future__ import annotations

import polars as pl
import torch

from dualform.errors import QuestionError
from dualform.evaluate.ranks import auc
from dualform.query.dual import Dual


def mislabel_auc(
    dual: Dual, planted: str, *, by: str = "sample_id", layer: str | None = None, reduction: str | None = None
) -> float:
    """The chance that a sample whose label was flipped ranks before one whose label was not.

    planted: a Boolean column of the recording, recorder.batch(…, flipped=flipped[ids]), that says which were flipped.
    """
    known = {column.name: column.type for column in dual.store.manifest.columns}
    if known.get(planted) != "Boolean":
        raise QuestionError(
            f"planted={planted!r}: expected a Boolean column of the recording, true for the samples whose labels were "
            f"flipped. Columns: {', '.join(f'{name} ({kind})' for name, kind in known.items()) or 'none'}."
        )
    found = dual.mislabelled(None, by=by, layer=layer, reduction=reduction)
    flipped = dual.rows.group_by(by).agg(pl.col(planted).any())
    joined = found.select(by, "score").join(flipped, on=by, how="left", maintain_order="left")
    area = auc(torch.from_numpy(joined["score"].to_numpy().copy()), torch.tensor(joined[planted].to_list()))
    if area != area:
        raise QuestionError(f"planted={planted!r}: there are either no flipped samples or no others.")
    return area
