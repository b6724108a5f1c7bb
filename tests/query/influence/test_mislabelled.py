import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
import padded
import shared
from dualform.errors import NotRecordedError, QuestionError, UnknownLayerError
from training import CLASSES, network, samples, train

INPUTS, LABELS = samples()


def visits_of(trained):
    """For each sample the probabilities at each visit, by running the network of that moment."""
    found = {}
    for step, ids in enumerate(trained.ids):
        model = network()
        model.load_state_dict(trained.checkpoints[step])
        with torch.no_grad():
            for sample, p in zip(ids.tolist(), F.softmax(model(INPUTS[ids]), 1), strict=True):
                found.setdefault(sample, []).append(p)
    return {sample: torch.stack(some) for sample, some in found.items()}


def test_samples_come_by_their_mean_error_signal_with_what_the_model_said(trained):
    frame = trained.dual.mislabelled()
    expected = visits_of(trained)
    assert sorted(frame["sample_id"]) == sorted(expected)
    assert frame["rank"].to_list() == list(range(1, frame.height + 1))
    assert frame["score"].is_sorted(descending=True)
    for row in frame.to_dicts():
        p, label = expected[row["sample_id"]], int(LABELS[row["sample_id"]])
        error = p - F.one_hot(torch.tensor(label), CLASSES)
        others = p.mean(0).clone()
        others[label] = -1
        assert row["score"] == pytest.approx(float(error.norm(dim=1).mean()), abs=1e-12)
        assert (row["visits"], row["label"], row["unit"]) == (len(p), label, label)
        assert row["probability"] == pytest.approx(float(p[:, label].mean()), abs=1e-12)
        assert row["said"] == int(others.argmax())
        assert row["said_probability"] == pytest.approx(float(others.max()), abs=1e-12)
        assert row["wrong"] == int((p.argmax(1) != label).sum())


def test_k_where_and_by(trained):
    dual = trained.dual
    everything = dual.mislabelled(None)
    assert dual.mislabelled(3).equals(everything.head(3))
    late = dual.mislabelled(where=pl.col("step") >= 3)
    assert late["visits"].sum() == 15
    by_label = dual.mislabelled(by="label")
    assert by_label["visits"].sum() == everything["visits"].sum()
    assert by_label.sort("label")["label"].to_list() == sorted(set(everything["label"]))
    assert by_label.sort("label")["unit"].to_list() == by_label.sort("label")["label"].to_list()
    assert dual.at(2).mislabelled()["visits"].sum() == 10
    assert dual.at(0).mislabelled().height == 0


def test_a_mean_over_batches_of_several_sizes_is_undone(tmp_path):
    scores = {}
    for rows in (2, 8):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with dualform.record(model, optimizer, tmp_path / str(rows), dtype="float64") as recorder:
            for ids in torch.arange(8).split(rows):
                recorder.batch(sample_id=ids)
                F.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
                optimizer.step()
                optimizer.zero_grad()
        dual = dualform.open(tmp_path / str(rows), model)
        scores[rows] = dual.mislabelled().sort("sample_id")["score"].to_numpy()
        raw = dual.mislabelled(reduction="sum").sort("sample_id")["score"].to_numpy()
        assert raw * rows == pytest.approx(scores[rows])
    assert scores[2] == pytest.approx(scores[8], abs=1e-14)


def test_flipped_labels_come_first(tmp_path):
    torch.manual_seed(0)
    inputs, labels = torch.randn(60, 5), torch.arange(60) % 3
    inputs[:, :3] += 6 * F.one_hot(labels, 3)
    flipped = torch.arange(60) % 10 == 0
    told = torch.where(flipped, (labels + 1) % 3, labels)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(10):
            for ids in torch.randperm(60).split(12):
                recorder.batch(sample_id=ids, label=told[ids])
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[ids]), told[ids]).backward()
                optimizer.step()
    frame = dualform.open(tmp_path / "run", model).mislabelled(6)
    assert sorted(frame["sample_id"]) == flipped.nonzero()[:, 0].tolist()
    assert frame["said"].to_list() == labels[frame["sample_id"].to_list()].tolist()
    assert frame["unit"].to_list() == frame["label"].to_list()


def test_other_losses_are_ranked_without_the_evidence_of_softmax(tmp_path):
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = INPUTS.float()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=torch.arange(12))
        F.mse_loss(model(inputs), torch.randn(12, CLASSES)).backward()
        optimizer.step()
    frame = dualform.open(tmp_path / "run", model).mislabelled()
    assert frame["score"].min() > 0
    for name in ("unit", "probability", "said", "said_probability", "wrong"):
        assert frame[name].null_count() == 12


def test_a_passage_of_many_words_has_probabilities_but_no_single_unit(tmp_path):
    torch.manual_seed(0)
    words = torch.randint(0, 9, (6, 4))
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=torch.arange(6))
        logits = model(words[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()
    frame = dualform.open(tmp_path / "run", model).mislabelled().sort("sample_id")
    expected = F.softmax(logits.detach(), -1).gather(2, words[:, 1:, None])[..., 0].mean(1)
    assert frame["probability"].to_numpy() == pytest.approx(expected.numpy(), abs=1e-5)
    assert frame["visits"].to_list() == [3] * 6
    some = [len(set(row)) > 1 for row in words[:, 1:].tolist()]
    assert frame["said"].is_null().to_list() == some


def test_refusals(trained, tmp_path):
    dual = trained.dual
    with pytest.raises(QuestionError, match=r"top\(0\)|whole number"):
        dual.mislabelled(0)
    with pytest.raises(QuestionError, match='expected "mean" or "sum"'):
        dual.mislabelled(reduction="none")
    with pytest.raises(UnknownLayerError, match="'9' was not recorded"):
        dual.mislabelled(layer="9")
    with pytest.raises(QuestionError, match="no column 'sample'"):
        dual.mislabelled(by="sample")
    keys = train(tmp_path / "keys", keep="keys")
    with pytest.raises(NotRecordedError, match="keeps keys only"):
        keys.dual.mislabelled()
    some = train(tmp_path / "some", outputs={"2": [0, 1]})
    with pytest.raises(NotRecordedError, match="some output units"):
        some.dual.mislabelled()


def test_columns_of_the_recording_that_are_called_like_ours(tmp_path):
    torch.manual_seed(0)
    model, x, labels = torch.nn.Sequential(torch.nn.Linear(5, 3)), torch.randn(6, 5), torch.arange(6) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=torch.arange(6), score=torch.arange(6) / 2, unit=labels + 7)
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    found = dual.mislabelled()
    assert found["score_recorded"].to_list() == [n / 2 for n in found["sample_id"]]
    assert found["unit_recorded"].to_list() == [n + 7 for n in found["unit"]]
    assert dual.mislabelled(by="unit")["unit_recorded"].sort().to_list() == [7, 8, 9]


def test_a_last_layer_that_was_never_called_is_not_the_output(tmp_path):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.spare = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(x)

    model, x, labels = TwoHeads(), torch.randn(6, 5), torch.arange(6) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="'spare': never called"):
        with dualform.record(model, optimizer, tmp_path / "run") as recorder:
            recorder.batch(sample_id=torch.arange(6))
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.mislabelled().equals(dual.mislabelled(layer="head"))
    assert dual.mislabelled().height == 6


# Language models: most positions may be padding


def frozen(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


LONG_AND_SHORT = [torch.tensor(ids) for ids in ([0, 2], [1, 5, 3], [2, 4, 7, 6], [0, 1], [5, 6])]


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_only_positions_that_had_a_loss_count(tmp_path, precision):
    """A sample's score is the mean over its labelled tokens of ‖p − 1[label]‖, however long it is, and its batch mates are."""
    dual = padded.train(tmp_path / "run", optimizer=frozen, batches=LONG_AND_SHORT, precision=precision)
    frame = dual.mislabelled()
    with torch.no_grad():
        p = dual.model()(padded.one_hot(torch.arange(padded.SAMPLES), precision)).softmax(-1)
    times = dual.rows["sample_id"].value_counts()
    for sample, count in times.iter_rows():
        labelled = ~padded.PADDING[sample]
        found = frame.filter(pl.col("sample_id") == sample)
        if not labelled.any():
            assert not found.height
            continue
        errors = p[sample][labelled] - F.one_hot(padded.LABELS[sample][labelled], padded.TOKENS)
        assert found["score"].item() == pytest.approx(float(errors.norm(dim=1).mean()), rel=1e-5)
        assert found["visits"].item() == count * int(labelled.sum())
        assert found["probability"].item() == pytest.approx(
            float(p[sample][labelled].gather(1, padded.LABELS[sample][labelled][:, None]).mean()), rel=1e-5
        )


def test_a_sum_of_losses_is_not_divided(tmp_path):
    model = padded.network()
    optimizer = frozen(model.parameters())
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64") as recorder:
        for ids in LONG_AND_SHORT:
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            logits = model(padded.one_hot(ids)).flatten(0, 1)
            F.cross_entropy(logits, padded.LABELS[ids].flatten(), reduction="sum").backward()
            optimizer.step()
    summed = dualform.open(tmp_path / "run", model).mislabelled(reduction="sum")
    mean = padded.train(tmp_path / "mean", optimizer=frozen, batches=LONG_AND_SHORT).mislabelled()
    assert summed["sample_id"].to_list() == mean["sample_id"].to_list()
    assert summed["score"].to_list() == pytest.approx(mean["score"].to_list(), rel=1e-12)


def test_what_serves_all_rows_is_no_sample(tmp_path):
    dual = shared.train(tmp_path / "run")
    frame = dual.mislabelled(layer=shared.SHARED)
    assert not frame.height
