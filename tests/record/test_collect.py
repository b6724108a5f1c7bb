"""Models that are already trained: slots are collected at fixed weights, and the model is left as it was."""

import copy
from dataclasses import replace

import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualform
from dualform.errors import NotRecordedError, RecordingError, StoreDamagedError, UnexplainedError
from dualform.record import Recorder
from dualform.store.collection import Collection, read_collection
from training import SAMPLES, network, samples

BATCH = 5


def data():
    return TensorDataset(*samples())


def loader(shuffle=False):
    return DataLoader(data(), batch_size=BATCH, shuffle=shuffle)


def loss_fn(model, batch):
    inputs, labels = batch[:2]
    return F.cross_entropy(model(inputs), labels)


def gradients_of_samples(model):
    """∂loss/∂parameter of each sample alone, (samples, *shape) by name: one backward pass each."""
    model = copy.deepcopy(model).eval()
    inputs, labels = samples()
    found = {name: [] for name, _ in model.named_parameters()}
    for place in range(SAMPLES):
        model.zero_grad()
        F.cross_entropy(model(inputs[place : place + 1]), labels[place : place + 1]).backward()
        for name, parameter in model.named_parameters():
            found[name].append(parameter.grad.clone())
    return {name: torch.stack(values) for name, values in found.items()}


def collected_gradients(dual, layer, begin, end):
    """The same from the slots of some batches, each slot's gradient times the rows of its batch: (samples, d_out, d_in + 1)."""
    found = []
    for chunk in dual.store.chunks(layer, begin_step=begin, end_step=end):
        keys = chunk.keys(torch.float64, 0, chunk.slots).vectors()
        errors = chunk.errors(torch.float64, 0, chunk.slots)
        rows = torch.from_numpy(chunk.per_slot(chunk.blocks[:, 4]))
        is_inside = torch.from_numpy(chunk.per_slot(chunk.blocks[:, 0]) >= begin)
        with_bias = torch.cat([keys, torch.ones(len(keys), 1)], 1)
        products = torch.einsum("no,ni->noi", errors * rows[:, None], with_bias)
        found.append(products[is_inside])
    return torch.cat(found)


def assert_plain_gradients(dual, model, begin=0, end=3):
    expected = gradients_of_samples(model)
    for layer in dual.layers:
        found = collected_gradients(dual, layer, begin, end)
        weight, bias = expected[f"{layer}.weight"], expected[f"{layer}.bias"]
        torch.testing.assert_close(found, torch.cat([weight, bias[:, :, None]], 2), rtol=1e-10, atol=1e-13)


def test_slots_are_the_gradients_of_each_sample(tmp_path):
    model = network()
    path = dualform.collect(model, loader(), loss_fn, tmp_path / "run")
    dual = dualform.open(path, model)
    assert dual.layers == ["0", "2"]
    assert dual.rows["sample_id"].to_list() == list(range(SAMPLES))
    assert_plain_gradients(dual, model)


def test_several_checkpoints_are_several_passes(tmp_path):
    models = [network(seed=seed) for seed in range(3)]
    states = [model.state_dict() for model in models]
    torch.save(states[1], tmp_path / "one.pt")
    used = network(seed=9)
    dualform.collect(
        used,
        loader(),
        loss_fn,
        tmp_path / "run",
        checkpoints=[states[0], tmp_path / "one.pt", lambda model: model.load_state_dict(states[2])],
    )
    dual = dualform.open(tmp_path / "run", used)
    assert dual.checkpoints.select("begin", "end").rows() == [(0, 3), (3, 6), (6, 9)]
    for number, model in enumerate(models):
        begin, end = 3 * number, 3 * number + 3
        assert_plain_gradients(dual, model, begin, end)
        for step in (begin + 1, end):
            for name, value in dual.at(step).model().state_dict().items():
                torch.testing.assert_close(value, states[number][name], rtol=0, atol=0)
    assert dual.rows["checkpoint"].to_list() == [0] * SAMPLES + [1] * SAMPLES + [2] * SAMPLES
    # A copy of the weights for each, and no more
    assert len(dual.info()["snapshots"]) == 3


def state_of(model):
    tensors = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return tensors, [module.training for module in model.modules()]


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(tmp_path, training):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(), nn.Linear(7, 4)).double()
    model[0].requires_grad_(False)
    model[1].eval()
    for parameter in model[3].parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = model[3].weight.grad
    tensors, flags = state_of(model)
    before = torch.get_rng_state()
    other = {name: value + 1 for name, value in model.state_dict().items() if not name.startswith("0.")}
    dualform.collect(
        model, loader(), loss_fn, tmp_path / "run", training=training, check_rows=False, checkpoints=[other]
    )
    assert torch.equal(torch.get_rng_state(), before)
    after, flags_after = state_of(model)
    assert flags_after == flags
    for name, value in tensors.items():
        assert torch.equal(after[name], value), name
    assert model[3].weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]


def test_it_is_left_as_it_was_by_an_exception_too(tmp_path):
    model = network()
    tensors, _ = state_of(model)

    def failing(model, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dualform.collect(model, loader(), failing, tmp_path / "run", checkpoints=[network(seed=3).state_dict()])
    for name, value in state_of(model)[0].items():
        assert torch.equal(value, tensors[name])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_audit_sees_a_loss_that_goes_past_the_layers(tmp_path):
    model = network()

    def decayed(model, batch):
        return loss_fn(model, batch) + model[0].weight.square().sum()

    with pytest.raises(UnexplainedError):
        dualform.collect(model, loader(), decayed, tmp_path / "run")


class CutError(Exception):
    pass


def failing_after(count):
    """A loss that raises an exception instead of that of batch `count`."""
    calls = []

    def loss(model, batch):
        if len(calls) == count:
            raise CutError
        calls.append(None)
        return loss_fn(model, batch)

    return loss


@pytest.mark.parametrize("after", range(7))
def test_one_that_was_cut_goes_on(tmp_path, after):
    """Wherever it was cut, it is the same in the end as one that was not."""
    checkpoints = [network(seed=0).state_dict(), network(seed=1).state_dict()]
    model = network(seed=2)
    with pytest.raises(CutError) if after < 6 else pytest.MonkeyPatch.context():
        dualform.collect(model, loader(), failing_after(after), tmp_path / "cut", checkpoints=checkpoints)
    dualform.collect(model, loader(), loss_fn, tmp_path / "cut", checkpoints=checkpoints, resume=True)
    dualform.collect(model, loader(), loss_fn, tmp_path / "whole", checkpoints=checkpoints)
    cut, whole = (dualform.open(tmp_path / name, model) for name in ("cut", "whole"))
    assert cut.rows.equals(whole.rows)
    assert cut.log.equals(whole.log)
    assert cut.info()["ended"] == "closed"
    assert cut.checkpoints.equals(whole.checkpoints)
    inputs, _ = samples()
    for name in ("0", "2"):
        assert torch.equal(collected_gradients(cut, name, 0, 6), collected_gradients(whole, name, 0, 6))
    found = [dual.influence(inputs[:3]).sums("sample_id").totals for dual in (cut, whole)]
    torch.testing.assert_close(found[0], found[1])


def test_resume_begins_where_nothing_is(tmp_path):
    dualform.collect(network(), loader(), loss_fn, tmp_path / "run", resume=True)
    assert dualform.open(tmp_path / "run").end_step == 3


def test_a_further_checkpoint_is_added(tmp_path):
    states = [network(seed=seed).state_dict() for seed in range(2)]
    model = network()
    dualform.collect(model, loader(), loss_fn, tmp_path / "run", checkpoints=states[:1])
    dualform.collect(model, loader(), loss_fn, tmp_path / "run", checkpoints=states, resume=True)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.checkpoints["name"].to_list() == ["checkpoint 0", "checkpoint 1"]
    assert_plain_gradients(dual, network(seed=1), 3, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mean": "none"}, "loss_mean=tokens, and now it is none"),
        ({"training": True}, "training_mode"),
        ({"checkpoints": {"another": network(seed=5).state_dict()}}, "checkpoints"),
        ({"loader": list(loader())[::-1], "columns": {"sample_id": lambda batch: batch[1]}}, "not those that were"),
    ],
)
def test_resume_refuses_what_is_another_collection(tmp_path, changes, message):
    model = network()
    options = {"columns": {"sample_id": lambda batch: batch[1]}}
    with pytest.raises(CutError):
        dualform.collect(model, loader(), failing_after(2), tmp_path / "run", **options)
    given = {**options, **changes}
    with pytest.raises(RecordingError, match=message):
        dualform.collect(model, given.pop("loader", loader()), loss_fn, tmp_path / "run", resume=True, **given)


def test_resume_refuses_other_weights_and_recordings(tmp_path, trained):
    with pytest.raises(CutError):
        dualform.collect(network(), loader(), failing_after(2), tmp_path / "run")
    with pytest.raises(RecordingError, match="is not what the recording"):
        dualform.collect(network(seed=5), loader(), loss_fn, tmp_path / "run", resume=True)
    with pytest.raises(RecordingError, match="holds a recording of a training, not a collection"):
        dualform.collect(network(), loader(), loss_fn, trained.path, resume=True)


# What a loader yields


def test_a_shuffling_loader_needs_ids(tmp_path):
    with pytest.raises(RecordingError, match=r"shuffle=False.*columns=\{\"sample_id\""):
        dualform.collect(network(), loader(shuffle=True), loss_fn, tmp_path / "run")
    named = DataLoader(TensorDataset(*samples(), torch.arange(100, 100 + SAMPLES)), batch_size=BATCH, shuffle=True)
    path = dualform.collect(network(), named, loss_fn, tmp_path / "run", columns={"sample_id": 2, "label": 1})
    rows = dualform.open(path).rows
    assert sorted(rows["sample_id"].to_list()) == list(range(100, 100 + SAMPLES))
    assert (rows["label"] == (rows["sample_id"] - 100) % 4).all()


@pytest.mark.parametrize(
    "columns",
    [["label"], "label", {"label": "label"}, {"label": lambda batch: batch["label"]}],
    ids=["list", "name", "mapping", "function"],
)
def test_batches_that_are_dictionaries(tmp_path, columns):
    inputs, labels = samples()
    batches = [{"x": inputs[i : i + 4], "label": labels[i : i + 4]} for i in range(0, SAMPLES, 4)]
    path = dualform.collect(
        network(), batches, lambda m, b: F.cross_entropy(m(b["x"]), b["label"]), tmp_path / "run", columns=columns
    )
    rows = dualform.open(path).rows
    assert rows["label"].to_list() == labels.tolist()
    assert rows["sample_id"].to_list() == list(range(SAMPLES))


def test_a_function_gives_all_columns(tmp_path):
    def columns(batch):
        return {"sample_id": [f"n{label}" for label in batch[1].tolist()]}

    path = dualform.collect(network(), loader(), loss_fn, tmp_path / "run", columns=columns)
    assert dualform.open(path).rows["sample_id"][:4].to_list() == ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {"label": "label"}}, "to be found at 'label' of a batch, but a batch has a list of 2 entries"),
        ({"columns": {"checkpoint": 1}}, "'checkpoint' is taken"),
        ({"loss_fn": lambda m, b: 1.0}, "gave float: expected the loss"),
        ({"loss_fn": lambda m, b: m(b[0]).sum(1)}, r"gave a tensor of shape \(5,\)"),
        ({"loss_fn": lambda m, b: m(b[0]).sum().detach()}, "without a gradient"),
        ({"loss_mean": "mean"}, "loss_mean='mean': expected one of 'tokens', 'rows', 'none'"),
        ({"learning_rates": [0.1, 0.1]}, "a number above 0 for each of the 1 checkpoints"),
        ({"checkpoints": []}, "expected at least one"),
        ({"checkpoints": [{"0.weight": torch.zeros(7, 5)}]}, "lacks '0.bias', '2.weight', '2.bias'.*lambda model"),
        ({"checkpoints": [{"a.weight": torch.zeros(7, 5)}]}, "it has 'a.weight' that the model does not have"),
        ({"keep": "totals"}, "keeps slots"),
        ({"loader": []}, "gave no batch"),
        ({"loader": [["a"]]}, "no tensor that tells how many rows"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    given = {"loader": loader(), "loss_fn": loss_fn, **changes}
    with pytest.raises(RecordingError, match=message):
        dualform.collect(network(), given.pop("loader"), given.pop("loss_fn"), tmp_path / "run", **given)


def test_a_loader_that_is_used_up_is_refused(tmp_path):
    states = [network(seed=seed).state_dict() for seed in range(2)]
    with pytest.raises(RecordingError, match="gave no batch for 'checkpoint 1'"):
        dualform.collect(network(), iter(list(loader())), loss_fn, tmp_path / "run", checkpoints=states)


def test_a_model_without_gradients_is_refused(tmp_path):
    with pytest.raises(RecordingError, match=r"requires_grad_\(True\)"):
        dualform.collect(network().requires_grad_(False), loader(), loss_fn, tmp_path / "run")


def test_only_some_parameters(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="'0': its weight is in no optimizer"):
        path = dualform.collect(model, loader(), loss_fn, tmp_path / "run", optimizer=optimizer)
    assert dualform.open(path).layers == ["2"]


# What can be asked


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Two checkpoints, with learning rates."""
    path = tmp_path_factory.mktemp("collected") / "run"
    states = {"early": network(seed=0).state_dict(), "late": network(seed=1).state_dict()}
    dualform.collect(network(), loader(), loss_fn, path, checkpoints=states, learning_rates=[0.1, 0.3])
    return dualform.open(path, network())


def test_it_says_what_it_is(collected):
    said = "collected at 2 checkpoints, not recorded during training"
    assert said in repr(collected)
    assert collected.info()["origin"] == said
    assert collected.checkpoints["learning_rate"].to_list() == [0.1, 0.3]
    certificate = collected.verify()
    assert certificate.passed
    assert said in str(certificate)
    assert "nothing was trained, so there is no sum to verify" in str(certificate)
    assert "rows: proved at step 0" in str(certificate)


def test_a_recording_says_so_too(dual):
    assert dual.info()["origin"] == "recorded during training"
    assert dual.checkpoints.is_empty()


@pytest.mark.parametrize(
    "ask",
    [
        lambda dual: dual.contributions(samples()[0]),
        lambda dual: dual.masked(drop=pl.col("sample_id") == 1),
        lambda dual: dual.mask_reads(drop=pl.col("sample_id") == 1),
        lambda dual: dual.compact(1),
        lambda dual: dual.optimizer_state(),
        lambda dual: dual.layer("2").values,
        lambda dual: dualform.build_totals(dual.store.location, "sample_id"),
    ],
    ids=["contributions", "masked", "mask_reads", "compact", "optimizer_state", "values", "totals"],
)
def test_questions_about_training_are_refused(collected, ask):
    with pytest.raises(NotRecordedError, match=r"influence\(\).*docs/trained-models.md"):
        ask(collected)


def test_attention_and_wrong_labels_are_answered(collected):
    inputs, _ = samples()
    totals = collected.attend(inputs[:2])["0"].sums("sample_id").totals
    torch.testing.assert_close(totals, 2 * inputs[:2] @ inputs.T)
    assert collected.mislabelled(3).height == 3


def test_segments_are_checkpoints(collected):
    inputs, _ = samples()
    found = collected.influence(inputs[:2])
    assert found.segments == [(0, 3), (3, 6)]
    last = collected.influence(inputs[:2], segments=1)
    assert last.segments == [(3, 6)]


def test_influence_is_the_weighted_sum_over_checkpoints(collected, tmp_path):
    """As of two collections with a checkpoint each; the learning rates 0.1 and 0.3 count as 0.5 and 1.5."""
    inputs, _ = samples()
    target = torch.zeros(2, dtype=torch.int64)
    apart = []
    for seed in range(2):
        model = network(seed=seed)
        path = dualform.collect(model, loader(), loss_fn, tmp_path / str(seed))
        apart.append(dualform.open(path, model).influence(inputs[:2], target=target).sums("sample_id").totals)
    together = collected.influence(inputs[:2], target=target).sums("sample_id").totals
    torch.testing.assert_close(together, 0.5 * apart[0] + 1.5 * apart[1])


def test_a_sum_is_told(tmp_path):
    """The same influence, whether the loss is a mean or a sum that is called one."""
    inputs, _ = samples()
    found = []
    for loss_mean, reduction in (("tokens", "mean"), ("none", "sum")):
        path = dualform.collect(
            network(),
            loader(),
            lambda m, b, reduction=reduction: F.cross_entropy(m(b[0]), b[1], reduction=reduction),
            tmp_path / reduction,
            loss_mean=loss_mean,
        )
        dual = dualform.open(path, network())
        found.append((dual.influence(inputs[:2]).sums("sample_id").totals, dual.mislabelled(None)["score"]))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).abs().max() < 1e-12


def test_keys_alone(tmp_path):
    path = dualform.collect(network(), loader(), loss_fn, tmp_path / "run", keep="keys")
    dual = dualform.open(path, network())
    assert dual.attend(samples()[0][:1])["0"].top(2).height == 2
    with pytest.raises(NotRecordedError, match="keeps keys only"):
        dual.influence(samples()[0][:1])


def test_progress_is_told(tmp_path):
    told = []
    dualform.collect(network(), loader(), loss_fn, tmp_path / "run", progress=lambda *one: told.append(one))
    assert told == [("the model as it is", done, 3) for done in (1, 2, 3)]


def test_a_setting_that_cannot_be_read_is_damage(collected):
    manifest = replace(collected.store.manifest, settings={"seed": "1", "collected": "[]"})
    with pytest.raises(StoreDamagedError, match="'collected' cannot be read"):
        read_collection(manifest)
    text = Collection(("one",), "tokens", False, (0.1, 0.2)).dump()
    with pytest.raises(StoreDamagedError, match="'collected' does not fit itself"):
        read_collection(replace(manifest, settings={"collected": text}))


def test_weights_that_a_kill_has_lost_come_back(tmp_path, monkeypatch):
    """Killed between the first batch of the second checkpoint and the snapshot behind it: gone on with, all is there."""
    states = [network(seed=seed).state_dict() for seed in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "seal", lambda self: self._recording._writer.wait())
        with pytest.raises(CutError):
            dualform.collect(network(), loader(), failing_after(4), tmp_path / "run", checkpoints=states)
    cut = dualform.open(tmp_path / "run", network())
    assert cut.info()["snapshots"] == [0]
    assert cut.influence(samples()[0][:1]).segments == [(0, 3)]
    dualform.collect(network(), loader(), loss_fn, tmp_path / "run", checkpoints=states, resume=True)
    model = dualform.open(tmp_path / "run", network()).model()
    for name, value in model.state_dict().items():
        assert torch.equal(value, states[1][name])
