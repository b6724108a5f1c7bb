"""keep="projected": what is stored of each row, and what does not go with it."""

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import NotRecordedError, RecordingError, UnexplainedError
from dualform.layers.keys import RowGradients
from dualform.layers.projected import SlotViews
from dualform.record import row_gradients
from dualform.store.reader import Store
from recorded_networks import NETWORKS, target, train
from training import network as small_network

SIZE = 3


@pytest.fixture
def always_summed(monkeypatch):
    """The layers are tiny, and their gradients not always smaller than their slots."""
    monkeypatch.setattr(row_gradients, "is_smaller", lambda layer, numbers: True)


@pytest.mark.parametrize("network", NETWORKS)
def test_rows_are_the_projected_gradients_of_rows(network, tmp_path, always_summed):
    of_slots = train(network, "sgd", tmp_path / "slots").dual.store
    projected = train(network, "sgd", tmp_path / "projected", keep="projected", projection=SIZE, resume=False)
    stored = projected.dual.store
    for layer in stored.manifest.layers:
        found = projected_rows(stored, layer)
        expected = expected_rows(of_slots, layer)
        assert found.keys() == expected.keys()
        for row, gradient in expected.items():
            torch.testing.assert_close(found[row], gradient, rtol=0, atol=1e-11)


def projected_rows(store, layer):
    """By row: what is stored of its gradient, flat."""
    rows = {}
    for chunk in store.chunks(layer.name):
        numbers = chunk.rows()
        for low, high in chunk.pieces(layer.d_in + layer.d_out):
            keys, errors = chunk.pairs(torch.float64, low, high)
            for place in range(high - low):
                if isinstance(keys, RowGradients):
                    own = keys.data[place]
                elif layer.form == "parts":
                    own = torch.cat([keys.vectors()[place], errors[place]])
                else:
                    outer = torch.outer(errors[place], keys.vectors()[place]).flatten()
                    own = torch.cat([outer, errors[place]]) if layer.biases() else outer
                row = int(numbers[low + place])
                rows[row] = rows.get(row, 0) + own
    return rows


def expected_rows(store, layer):
    """The same from plain slots: Σ P_outᵀ error ⊗ P_inᵀ key, a slot at a time."""
    plain = store.manifest.layers[store.layer(layer.name)[0]]
    rows = {}
    for chunk in store.chunks(layer.name):
        numbers = chunk.rows()
        for low, high in chunk.pieces(plain.d_in + plain.d_out):
            keys, errors = chunk.pairs(torch.float64, low, high)
            vectors = keys.vectors()
            for place in range(high - low):
                row = int(numbers[low + place])
                rows[row] = rows.get(row, 0) + one_slot(layer, vectors[place], errors[place])
    return rows


def one_slot(layer, key, error):
    if layer.projected_from is None:
        outer = torch.outer(error, key).flatten()
        own = torch.cat([key, error]) if layer.form == "parts" else outer
        return torch.cat([own, error]) if layer.biases() and layer.form != "parts" else own
    views = SlotViews.of(layer)
    groups = views.groups
    p_in = [dense(view, len(key) // groups) for view in views.of_keys.values()]
    p_out = [dense(view, len(error)) for view in views.of_errors.values()]
    if layer.form == "parts":
        return torch.cat([p_in[0].T @ key, p_out[0].T @ error])
    matrix = torch.zeros(len(error), len(key) // groups, dtype=torch.float64)
    for group in range(groups):
        outputs = slice(group * len(error) // groups, (group + 1) * len(error) // groups)
        inputs = slice(group * len(key) // groups, (group + 1) * len(key) // groups)
        matrix[outputs] += torch.outer(error[outputs], key[inputs])
    seen = torch.cat(p_out, 1).T @ matrix @ torch.cat(p_in, 1)
    return torch.cat([seen.flatten(), torch.cat(p_out, 1).T @ error]) if layer.biases() else seen.flatten()


def dense(view, whole):
    """P of some columns of a vector, as a matrix for all of them."""
    columns = list(range(whole))
    if view.columns:
        edges = zip(view.columns[::2], view.columns[1::2], strict=True)
        columns = [column for begin, end in edges for column in range(begin, end)]
    matrix = torch.zeros(whole, view.size, dtype=torch.float64)
    like = torch.zeros(0, dtype=torch.float64)
    matrix[columns] = view.matrix(like) if view.is_random else torch.eye(view.size, dtype=torch.float64)
    return matrix


def test_the_matrices_are_not_stored_and_those_of_two_recordings_differ(tmp_path):
    seeds = set()
    for name in ("one", "other"):
        store = train("gpt", "sgd", tmp_path / name, keep="projected", projection=SIZE).dual.store
        seeds |= {layer.projected_from.seed for layer in store.manifest.layers if layer.projected_from}
        again = Store(store.files)
        assert again.manifest.layers == store.manifest.layers
    projected = [layer for layer in store.manifest.layers if layer.projected_from]
    assert len(seeds) == 2 * len(projected) > 2


def test_a_resumed_recording_goes_through_the_same_matrices(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    layers = []
    for resume in (False, True):
        with dualform.record(
            model, optimizer, tmp_path / "run", keep="projected", projection=SIZE, resume=resume
        ) as recorder:
            step(model, optimizer, recorder)
        layers.append(dualform.open(tmp_path / "run", model).store.manifest.layers)
    assert layers[0] == layers[1]
    with pytest.raises(RecordingError, match="has other layers than this model and these settings"):
        dualform.record(model, optimizer, tmp_path / "run", keep="projected", projection=SIZE + 1, resume=True)


def step(model, optimizer, recorder, inputs=9):
    recorder.batch(sample_id=torch.arange(4))
    optimizer.zero_grad()
    model(torch.randn(4, inputs)).square().mean().backward()
    optimizer.step()


def test_the_audit_sees_the_slots_before_they_are_projected(tmp_path):
    model = nn.Linear(9, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dualform.record(model, optimizer, tmp_path / "run", keep="projected", projection=SIZE) as recorder:
        step(model, optimizer, recorder)
        recorder.batch(sample_id=torch.arange(4))
        model(torch.randn(4, 9)).square().mean().backward()
        model.weight.grad[3, 2] += 0.5
        with pytest.raises(UnexplainedError):
            optimizer.step()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"keep": "everything"}, "keep='everything': expected one of 'slots', 'rows', 'projected', 'keys', 'totals'"),
        ({"keep": {"0": "totals", "*": "rows"}}, "expected one of 'slots', 'rows', 'projected', 'keys'[.]"),
        ({"keep": {}}, "keep={}: expected what is kept, by names or globs of layers"),
        ({"keep": {"0": "rows"}}, "keep= says nothing of layer '2'. Add its name"),
        (
            {"keep": ["rows"]},
            r"keep=\['rows'\]: expected one of 'slots', .*, or a dictionary from names or globs of layers",
        ),
        ({"keep": None}, "keep=None: expected one of 'slots'"),
        ({"keep": {0: "rows", "*": "slots"}}, "or a dictionary from names or globs of layers"),
        ({"keep": {"*": "rows", "0": "keys"}}, "names '0' after others that fit the same layers.* Put it before them"),
        ({"keep": {"7": "rows", "*": "slots"}}, "keep= names '7', which is not recorded. Recorded layers: '0', '2'"),
        ({"keep": "projected", "projection": 0}, "projection=0: expected a whole number of at least 1"),
        ({"every": True}, "every=True: expected a whole number of at least 1"),
        ({"every": 2, "totals": ["label"]}, "totals= need all steps, and every=2 keeps one step in 2"),
        ({"keep": "projected", "totals": ["label"]}, "they need keep=.* This recording keeps projected"),
        ({"keep": {"0": "keys", "*": "rows"}, "totals": ["label"]}, "keeps different things of different layers"),
        ({"keep": "projected", "outputs": {"2": [0]}}, 'outputs= and keep="projected" do not go together'),
    ],
)
def test_settings_that_contradict_each_other(settings, says, tmp_path):
    model = small_network()
    with pytest.raises(RecordingError, match=says):
        dualform.record(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run", **settings)


def test_what_needs_exact_slots_is_refused(tmp_path):
    run = train("gpt", "sgd", tmp_path / "run", keep="projected", projection=SIZE)
    inputs = run.inputs[:2]
    dual = run.dual
    needs = 'needs every slot as it was, but in .* keeps random projections .* Record with keep="slots"'
    for question in (
        lambda: dual.masked(drop="label = 1"),
        lambda: dual.compact(2),
        lambda: dualform.build_totals(tmp_path / "run", "label"),
    ):
        with pytest.raises(NotRecordedError, match=needs):
            question()
    for question in (lambda: dual.attend(inputs), lambda: dual.layer(dual.layers[1])):
        with pytest.raises(NotRecordedError, match="keeps random projections of its slots"):
            question()
    with pytest.raises(NotRecordedError, match="keeps projected only: the network is known after"):
        dual.at(2).model()


def test_verify_says_what_it_has_checked(tmp_path):
    dual = train("gpt", "sgd", tmp_path / "run", keep="projected", projection=SIZE).dual
    certificate = dual.verify()
    assert certificate.passed
    projected = certificate.frame.filter(certificate.frame["reason"].str.contains("so no sum was checked"))
    assert set(projected["verdict"]) == {"gradients"}
    assert "explained every gradient when they were recorded (the audit)" in projected["reason"][0]


def test_a_layer_whose_sides_are_short_is_exact(tmp_path):
    dual = train("norms", "sgd", tmp_path / "run", keep="projected").dual
    assert all(layer.projected_from is None for layer in dual.store.manifest.layers)
    assert set(dual.verify().frame["verdict"]) == {"pass"}


def test_info_says_what_was_kept_of_each_layer(tmp_path):
    dual = train(
        "gpt", "sgd", tmp_path / "run", keep={"head": "slots", "up": "rows", "*": "projected"}, projection=3
    ).dual
    info = dual.info()
    assert (info["keep"], info["every"]) == ("mixed", 1)
    kept = {
        layer["name"]: (layer["d_in"], layer["d_out"], layer["keep"], layer["projected_to"]) for layer in info["layers"]
    }
    assert kept["head"] == (6, 5, "slots", None)
    assert kept["up"] == (6, 8, "rows", None)
    assert kept["down"] == (8, 6, "projected", [3, 3])


def test_layers_that_differ_answer_what_each_of_them_can(tmp_path):
    run = train("gpt2", "sgd", tmp_path / "run", keep={"head": "keys", "c_fc": "rows", "*": "slots"})
    inputs = run.inputs[:2]
    assert set(run.dual.attend(inputs)) == {"c_proj", "head"}
    verdicts = dict(run.dual.verify().frame.select("parameter", "verdict").iter_rows())
    assert (verdicts["c_fc.weight"], verdicts["c_proj.weight"], verdicts["head.weight"]) == (
        "pass",
        "pass",
        "gradients",
    )
    says = "keeps keys only of 'head'. Name the others with layers="
    for question in (run.dual.influence, run.dual.contributions):
        with pytest.raises(NotRecordedError, match=says):
            question(inputs, target=target)
    exact = train("gpt2", "sgd", tmp_path / "slots")
    layers = ["c_fc", "c_proj"]
    found = [dual.contributions(inputs, target=target, layers=layers).total("label") for dual in (run.dual, exact.dual)]
    torch.testing.assert_close(found[0]["total"].to_torch(), found[1]["total"].to_torch(), rtol=0, atol=1e-12)
    with pytest.raises(NotRecordedError, match="layer 'head' keeps keys only, and no error signals"):
        run.dual.masked(drop="label = 1")


def test_influence_needs_snapshots_and_takes_them(tmp_path):
    run = train("gpt", "sgd", tmp_path / "run", keep="projected", projection=SIZE)
    found = run.dual.influence(run.inputs[:2], target=target)
    assert found.total("sample_id").height
    assert set(found.moments) <= set(run.dual.info()["snapshots"]) or len(run.dual.info()["snapshots"]) == 2
