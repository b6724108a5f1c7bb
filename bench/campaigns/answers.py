"""Everything that a store can be asked, as text that can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import dualform
from campaigns.runs import FEATURES, STEPS, Kind

QUERIES = 2


def answers(folder: Path, kind: Kind) -> list[str]:
    """All answers of a recording of this kind; each file of the store is read on the way."""
    dual = dualform.open(folder, kind.network())
    x = torch.linspace(-1, 1, QUERIES * FEATURES).reshape(QUERIES, FEATURES)
    info = dual.info()
    info.pop("path")
    found = [str(info), dual.rows.write_json(), dual.log.write_json(), dual.verify().to_json()]
    attention = dual.attend(x)
    for layer in attention:
        found.append(attention[layer].total("label").write_json())
        if kind.keeps_slots:
            found.append(attention[layer].top(50).write_json())
            found.append(attention[layer].total("half", absolute=True).write_json())
            found.append(dual.slots(layer).write_json())
    if kind.keeps_slots:
        contributions = dual.contributions(x)
        for layer in contributions:
            found.append(contributions[layer].top(3, where="label = 1", lowest=True).write_json())
            found.append(contributions[layer].parts().write_json())
        found += [_weights(dual.masked(only="sample_id < 4", read="kept")), _weights(dual.at(5).model())]
        found += [_weights(dual.at(step).model()) for step in dual.store.snapshot_steps()]
    found += [_weights(dual.masked(drop="label = 1")), _weights(dual.at(min(STEPS, dual.end_step)).model())]
    return found


def _weights(model: nn.Module) -> str:
    values: list[Any] = [parameter.tolist() for parameter in model.state_dict().values()]
    return str(values)
