"""The paper's remarks on a small training on digits, beside plain loops in float64."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dualform_paper import asides
from dualform_paper.asides import compacting, digits, kernels, limits, machine, orthogonal, rerun, softmax
from dualform_paper.section import Section, percent, table
from dualform_paper.settings import LAYERS

SMALL = digits.Settings(epochs=2, batch=20, train_images=60, test_images=12, width=16)
NAMES = list(LAYERS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return digits.prepare(tmp_path_factory.mktemp("asides") / "run", SMALL)


def numbers_in(section):
    """Each number of the data is plain, so that a report can be written as JSON."""
    return json.loads(json.dumps(section.data))


def test_the_recording_is_exact(run):
    assert run.dual.verify().passed
    assert run.dual.layer("0").slots == 120
    assert run.dual.layers == NAMES


def test_other_functions_in_the_place_of_layers(run):
    images = run.digits.test_images
    torch.testing.assert_close(run.answer(images), run.model(images).detach())
    torch.testing.assert_close(run.answer(images, {"2": run.model[2]}), run.model(images).detach())
    silenced = run.answer(images, {"4": lambda x: torch.zeros(len(x), 10)})
    assert not silenced.any()


# 2.3


def test_the_softmax_reading_by_a_plain_loop(run):
    layer, x = run.dual.layer("2"), run.queries("2", run.digits.test_images)
    K, V = layer.keys.double(), layer.values.double()
    expected = []
    for q in x.double():
        scores = [math.exp(float(k @ q)) for k in K]
        attention = sum(score / sum(scores) * v for score, v in zip(scores, V, strict=True))
        expected.append(layer.initial_weight.double() @ q + attention + layer.bias)
    found = softmax.reader(run, "2", softmax.softmax)(x)
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=0, atol=1e-5)


def test_the_same_total_is_shared_out_otherwise(run):
    weights = run.dual.layer("0").attention_weights(run.digits.test_images)
    torch.testing.assert_close(softmax.same_total(weights).sum(1), weights.sum(1))
    dot = softmax.reader(run, "0", lambda w: w)(run.digits.test_images)
    torch.testing.assert_close(dot, run.model[0](run.digits.test_images).detach(), rtol=0, atol=1e-5)


def test_entropy_in_bits():
    shares = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1, 0, 0, 0], [0.5, 0.5, 0, 0]])
    assert softmax.entropy(shares).tolist() == pytest.approx([2, 0, 1])


def test_the_softmax_section(run):
    found = softmax.measure(run)
    for reading in found.layers:
        assert 0 <= reading.entropy <= math.log2(120) + 1e-6
        assert 0 <= reading.right_softmax <= 1
        assert reading.size < 1  # an average is smaller than a sum
    initial = run.dual.at(0).model()
    biases = {name: lambda x, n=name: x @ initial[int(n)].weight.T + run.model[int(n)].bias for name in NAMES}
    without = run.digits.accuracy(run.answer(run.digits.test_images, biases))
    assert found.all_layers["nothing"] == without
    section = found.section()
    assert percent(found.all_layers["softmax"]) in section.text
    assert numbers_in(section)["slots"] == 120


# 3.2


def test_with_the_dot_product_the_dual_network_is_the_ordinary_one(run):
    """Trained for real in float64: the same losses, the same weights."""
    data = replace(run.digits, images=run.digits.images.double())
    dual, primal = kernels.network(SMALL, kernels.KERNELS["dot"]).double(), digits.network(SMALL).double()
    kernels.train(dual, SMALL.lr, data, SMALL)
    kernels.train_ordinary(primal, data, SMALL)
    torch.testing.assert_close(dual(data.images), primal(data.images), rtol=0, atol=1e-13)
    for name in (0, 2, 4):
        layer = dual[name]
        assert layer.keys.shape == (120, primal[name].in_features)
        weight = layer.initial_weight + sum(torch.outer(v, k) for v, k in zip(layer.values, layer.keys, strict=True))
        torch.testing.assert_close(weight, primal[name].weight.detach(), rtol=0, atol=1e-13)
        torch.testing.assert_close(layer.bias, primal[name].bias.detach(), rtol=0, atol=1e-13)


def test_its_slots_are_those_that_are_recorded(run):
    dual = kernels.network(SMALL, kernels.KERNELS["dot"])
    kernels.train(dual, SMALL.lr, run.digits, SMALL)
    for name in NAMES:
        recorded = run.dual.layer(name)
        torch.testing.assert_close(dual[int(name)].keys, recorded.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(dual[int(name)].values, recorded.values, rtol=0, atol=1e-6)


FORMULAS = {
    "dot": lambda x, keys: [x @ k for k in keys],
    "polynomial": lambda x, keys: [(x @ k) ** 2 / len(x) for k in keys],
    "softmax": lambda x, keys: [
        math.exp(x @ k / math.sqrt(len(x))) / sum(math.exp(x @ other / math.sqrt(len(x))) for other in keys)
        for k in keys
    ],
}
FORMULAS["softmax × slots"] = lambda x, keys: [len(keys) * w for w in FORMULAS["softmax"](x, keys)]


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_a_kernel_layer_by_a_plain_loop(kernel):
    torch.manual_seed(0)
    layer = kernels.KernelLinear(5, 3, kernels.KERNELS[kernel]).double()
    inputs = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(inputs), inputs @ layer.initial_weight.T + layer.bias)
    errors = torch.randn(4, 3, dtype=torch.float64)
    layer(inputs).backward(errors)
    layer.learn(0.5, 0.1)
    x = torch.randn(5, dtype=torch.float64)
    weights = FORMULAS[kernel](x, inputs)
    expected = layer.initial_weight @ x + sum(-0.5 * w * e for w, e in zip(weights, errors, strict=True)) + layer.bias
    torch.testing.assert_close(layer(x.unsqueeze(0))[0].detach(), expected)


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_error_signals_go_back_through_the_kernel(kernel):
    torch.manual_seed(0)
    layer = kernels.KernelLinear(5, 3, kernels.KERNELS[kernel]).double()
    layer(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    layer.learn(0.5, 0.1)
    assert torch.autograd.gradcheck(layer, torch.randn(2, 5, dtype=torch.float64, requires_grad=True))


def test_the_kernel_section(run, monkeypatch):
    monkeypatch.setattr(kernels, "RATES", dict.fromkeys(kernels.KERNELS, (0.2, 0.5)))
    told = []
    found = kernels.measure(run, 2, lambda *some: told.append(some))
    assert told[-1][1:] == (8, 8)
    assert found.difference < 1e-4
    for kernel in kernels.KERNELS:
        losses = [t.losses[-1] for t in found.trained if t.kernel == kernel]
        assert found.best(kernel).losses[-1] == min(losses)
    section = found.section()
    assert section.text.count("(best)") == 4
    assert numbers_in(section)["curves"]["dot"]["x"] == [1, 2]


def test_a_training_that_diverged_is_never_the_best():
    some = [kernels.Trained("dot", 1.0, (math.nan,), 0.1), kernels.Trained("dot", 0.5, (2.0,), 0.5)]
    assert kernels.OtherKernels(1, 12, 0.0, tuple(some)).best("dot").rate == 0.5


# 3.3


def test_the_null_space_of_keys():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(40, 3, generator=generator).double() @ torch.randn(3, 7, generator=generator).double()
    basis = orthogonal.null_space(keys)
    assert basis.shape == (4, 7)
    torch.testing.assert_close(basis @ basis.T, torch.eye(4).double())
    assert (keys @ basis.T).abs().max() < 1e-12


def test_orthogonal_inputs_get_the_initial_part_only(run):
    found = orthogonal.measure(run)
    aside, ordinary = found.met
    assert found.directions["0"] >= len(found.silent["0"]) >= 3
    assert aside.largest_weight < 1e-5
    assert aside.attention < 1e-6
    assert aside.difference < 1e-6
    assert aside.initial > 0.1
    assert ordinary.attention > 1e-3
    assert "orthogonal to training" in found.section().text
    assert numbers_in(found.section())["silent"]["0"] == list(found.silent["0"])


# 3.4


def test_rank_beside_error_beside_accuracy(run):
    found = compacting.measure(run)
    ranks = [c.rank for c in found.compacted]
    assert ranks == [1, 2, 3, 4, 6, 8, 9, 10, 12, 16]
    for name in NAMES:
        W, W0 = run.model[int(name)].weight.detach().double(), run.dual.layer(name).initial_weight.double()
        strengths = torch.linalg.svdvals(W - W0)
        for c in found.compacted:
            if c.rank <= len(strengths):
                expected = float(strengths[c.rank :].norm() / strengths.norm())
                assert c.errors[name] == pytest.approx(expected, abs=1e-5)
            else:
                assert name not in c.errors
    assert found.compacted[-1].accuracy == found.accuracy  # all that was learned
    curves = numbers_in(found.section())["curves"]
    assert curves["error, layer 4"]["x"] == [1, 2, 3, 4, 6, 8, 9, 10]
    assert curves["accuracy"]["x"] == ranks


# Equation 14


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_a_kernel_machine(run, name):
    found, x = machine.machine(run.dual.layer(name)), run.queries(name, run.digits.test_images)
    expected = run.model[int(name)](x).detach()
    by_hand = [
        sum(a * (pattern @ q) for a, pattern in zip(found.a.double(), found.patterns.double(), strict=True)) + found.b
        for q in x.double()
    ]
    torch.testing.assert_close(torch.stack(by_hand), expected.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found(x), expected, rtol=0, atol=1e-5)


def test_equal_patterns_are_one(run):
    first, *_ = machine.measure(run).layers
    assert (first.slots, first.distinct, first.unit_vectors) == (120, 60, 64)
    assert "60 in the place of 120" in machine.measure(run).section().text


# Equations 15 to 17


def test_keys_of_the_trained_network_by_a_plain_loop(run):
    found = {a.layer: a for a in rerun.measure(run).layers}
    rows = run.dual.rows
    for name in NAMES:
        keys = run.dual.layer(name).keys.double()
        cosines = []
        for step, sample, key in zip(rows["step"], rows["sample_id"], keys, strict=True):
            today = run.model[: int(name)](run.digits.images[sample]).detach().double()
            cosines.append((step, float(key @ today / key.norm() / today.norm())))
        for step in range(6):
            mine = [c for s, c in cosines if s == step]
            assert found[name].cosine_by_step[step] == pytest.approx(sum(mine) / len(mine), abs=1e-6)
        assert found[name].cosine == pytest.approx(sum(c for _, c in cosines) / len(cosines), abs=1e-6)


def test_in_the_first_layer_they_are_the_recorded_keys(run):
    first, second, _ = rerun.measure(run).layers
    assert first.cosine == pytest.approx(1)
    assert first.overlap > 0.95  # equal scores may be told apart by rounding
    assert first.correlation == pytest.approx(1)
    assert first.same_class == 1
    assert first.growth == pytest.approx(1)
    assert first.gap < 1e-5
    assert second.cosine < 0.9999
    assert second.gap > 1e-3


def test_overlap_and_totals_by_a_plain_loop(run):
    found = rerun.measure(run).layers[1]
    rows, layer = run.dual.rows, run.dual.layer("2")
    overlaps, correlations = [], []
    for image in run.digits.test_images:
        query = run.model[:2](image).detach().double()
        sums = [({}, {}), ({}, {})]
        for sample, label, key in zip(rows["sample_id"], rows["label"], layer.keys.double(), strict=True):
            today = run.model[:2](run.digits.images[sample]).detach().double()
            for (by_sample, by_label), k in zip(sums, (key, today), strict=True):
                by_sample[sample] = by_sample.get(sample, 0) + float(k @ query)
                by_label[label] = by_label.get(label, 0) + float(k @ query)
        best = [set(sorted(by_sample, key=by_sample.get)[-10:]) for by_sample, _ in sums]
        overlaps.append(len(best[0] & best[1]) / 10)
        totals = [torch.tensor([by_label.get(c, 0.0) for c in range(10)]) for _, by_label in sums]
        correlations.append(float(torch.corrcoef(torch.stack(totals))[0, 1]))
    assert found.overlap == pytest.approx(sum(overlaps) / 12)
    assert found.correlation == pytest.approx(sum(correlations) / 12, abs=1e-5)


def test_who_excites_a_unit_and_who_wrote_it(run):
    rows, layer = run.dual.rows, run.dual.layer("2")
    shared = []
    for unit in range(16):
        written = {}
        for sample, key, value in zip(rows["sample_id"], layer.keys.double(), layer.values.double(), strict=True):
            written[sample] = written.get(sample, 0) + value[unit] * key
        if sum(bool(total.any()) for total in written.values()) < 10:
            continue
        excited = {s: float(run.model[:3](run.digits.images[s]).detach()[unit]) for s in run.digits.train.tolist()}
        writers = sorted(written, key=lambda s: float(written[s].norm()))[-10:]
        shared.append(len(set(writers) & set(sorted(excited, key=excited.get)[-10:])) / 10)
    assert rerun.measure(run).writers["2"] == pytest.approx(sum(shared) / len(shared))


def test_equation_17_and_its_section(run):
    found = rerun.measure(run)
    assert found.block < 1e-5
    assert found.chance == 10 / 60
    section = found.section()
    assert numbers_in(section)["curves"]["layer 4"]["x"] == list(range(6))
    assert percent(found.accuracy_rerun) in section.text


# All of them


def test_every_limit_has_a_line():
    section = limits.section()
    assert len(section.text.splitlines()) == len(limits.LIMITS) == 5
    assert "CIFAR-10" in section.text


def test_all_sections(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "RATES", dict.fromkeys(kernels.KERNELS, (0.5,)))
    sections = asides.run(tmp_path / "run", settings=SMALL, kernel_epochs=1)
    again = asides.run(tmp_path / "run", lambda *_: None, settings=SMALL, kernel_epochs=1)
    assert sections == again
    for number, section in zip(("2.3", "3.2", "3.3", "3.4", "14", "15", "6"), sections, strict=True):
        assert number in section.title
        assert section.markdown.startswith(f"## {section.title}\n\n")
        assert "nan" not in section.text
        json.dumps(section.data, allow_nan=False)


def test_a_table():
    assert table(("a", "b"), [("x", "1")]) == "| a | b |\n| --- | --: |\n| x | 1 |"
    assert Section("A", "b").markdown == "## A\n\nb\n"


def test_the_network_is_not_changed_by_asking(run):
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    compacting.measure(run)
    softmax.measure(run)
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert isinstance(run.model, nn.Sequential)
