"""An evaluation of a collection: the views that it has are judged, the others say why not."""

import tiny
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualform


def test_a_collection_is_judged(recorded, tmp_path):
    trained = dualform.open(recorded, tiny.network()).model()
    inputs, labels = tiny.data()
    loader = DataLoader(TensorDataset(inputs[: tiny.SAMPLES], labels[: tiny.SAMPLES]), batch_size=10)
    dualform.collect(trained, loader, lambda m, b: F.cross_entropy(m(b[0]), b[1]), tmp_path / "run")
    found = dualform.evaluate(
        tmp_path / "run",
        tiny.study(),
        out=tmp_path / "kept",
        subsets=12,
        repeats=2,
        views=["attention", "contribution", "whitened", "kernel"],
    )
    lines = {line["view"]: line for line in found.frame.to_dicts()}
    assert "docs/trained-models.md" in lines["contribution"]["why"]
    assert lines["kernel"]["lds"] > 0.2
    assert lines["whitened"]["why"] is None
