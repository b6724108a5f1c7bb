"""The paper's image experiments on slices of MNIST and Fashion-MNIST, beside plain loops in float64.

Where the reference reads the same stored keys and values as the fast code, only float32 sums differ: 1e-5. Where it replays the
training, it knows nothing of the store, whose float16 rounds every key and error signal to 11 bits: 1e-3.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch

import dualform
from dualform_paper import data, examples
from dualform_paper.analysis import Analysis, analyse
from dualform_paper.forgetting import SUBSETS
from dualform_paper.settings import LAYERS, Settings, settings_for
from dualform_paper.tasks import load
from dualform_paper.training import network
from reference import paper as plain
from reference import ranking

pytestmark = pytest.mark.data

CASES = {
    "single-task": ("single-task", "reference"),
    "joint": ("joint", "reference"),
    "continual": ("continual", "reference"),
    "continual, vanilla": ("continual", "vanilla"),
}
CONTINUAL = ["continual", "continual, vanilla"]
SMALL = {"train_images": 1500, "test_images": 120, "width": 32, "batch": 32, "top": 40}
SUMS, FLOAT16 = 1e-5, 1e-3


@dataclass
class Case:
    """One experiment, and what the reference needs of it."""

    settings: Settings
    tasks: dict
    analysis: Analysis
    dual: dualform.Dual

    @property
    def numbers(self):
        return self.analysis.numbers

    @cached_property
    def weights(self):
        return {name: value.numpy().astype(np.float64) for name, value in self.dual.model().state_dict().items()}

    @cached_property
    def rows(self):
        return self.dual.rows.to_dict(as_series=False)

    @cached_property
    def labels(self):
        return np.array(self.rows["label"])

    @cached_property
    def images(self):
        """(dataset, sample) of each slot."""
        return list(zip(self.rows["dataset"], self.rows["sample_id"], strict=True))

    @cached_property
    def keys(self):
        return {layer: self.dual.layer(layer).keys.double().numpy() for layer in LAYERS}

    @cached_property
    def values(self):
        return {layer: self.dual.layer(layer).values.double().numpy() for layer in LAYERS}

    @cached_property
    def queries(self):
        """By dataset: the input of each layer."""
        return {name: plain.forward(self.weights, task.test.numpy())[0] for name, task in self.tasks.items()}

    @cached_property
    def answers(self):
        found = {name: plain.forward(self.weights, task.test.numpy())[1] for name, task in self.tasks.items()}
        return {name: logits.argmax(1).tolist() for name, logits in found.items()}

    @cached_property
    def attention(self):
        """(dataset, layer) → attention weights (queries, slots)."""
        return {
            (name, layer): self.queries[name][layer] @ self.keys[layer].T for name in self.tasks for layer in LAYERS
        }

    @cached_property
    def best(self):
        """(dataset, layer) → the best ten slots of each query, as the fast code has them; a test compares them."""
        return {
            (name, layer): self.dual.attend(task.test)[layer].best(10, absolute=True).slots.tolist()
            for name, task in self.tasks.items()
            for layer in LAYERS
        }

    @cached_property
    def replay(self):
        images = np.stack([self.tasks[name].train[sample].numpy() for name, sample in self.images])
        cuts = range(self.settings.batch, len(images), self.settings.batch)
        preset = self.settings.preset
        return plain.replay(
            {name: value.numpy() for name, value in network(self.settings).state_dict().items()},
            list(zip(np.split(images, cuts), np.split(self.labels, cuts), strict=True)),
            first_phase=self.settings.phases[0].steps,
            lr=preset.lr,
            momentum=preset.momentum,
            clip=preset.clip,
        )

    def each(self):
        """(name of a dataset, its task, layer, what was measured)."""
        for name, task in self.tasks.items():
            for layer in LAYERS:
                yield name, task, layer, self.numbers["datasets"][name]["layers"][layer]

    def by_dataset(self, name, layer):
        """Sums of sizes by dataset and class, {dataset: (queries, classes)}."""
        sizes, of = abs(self.attention[name, layer]), np.array(self.rows["dataset"])
        return {
            other: plain.class_totals(sizes[:, of == other], self.labels[of == other])
            for other in self.settings.datasets
        }


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    experiment, optimizer = CASES[request.param]
    settings = settings_for(experiment, optimizer=optimizer, steps=150, **SMALL)
    tasks = load(settings)
    folder = tmp_path_factory.mktemp("images") / "run"
    analysis = analyse(settings, tasks, folder, lambda what, done, total: None)
    return Case(settings, tasks, analysis, dualform.open(folder, network(settings)))


def cases(*names):
    return pytest.mark.parametrize("case", names or list(CASES), indirect=True, scope="module")


def assert_close(found, expected, *, bar, what=""):
    """Relative to the largest number of the expected ones; prints where, and by how much."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert found.shape == expected.shape, what
    apart = abs(found - expected) / max(abs(expected).max(initial=0), 1e-12)
    assert apart.max(initial=0) <= bar, f"{what}: {apart.max():.1e} at {np.unravel_index(apart.argmax(), apart.shape)}"


def assert_ranked(scores, places, weights=None):
    """These places are the best, best first; scores that differ by rounding only may change places."""
    scores = np.asarray(scores)
    assert len(set(places)) == len(places)
    best = np.sort(scores)[::-1][: len(places)]
    assert_close(scores[places], best, bar=SUMS)
    if weights is not None:
        assert_close(weights, best, bar=SUMS)


def assert_accuracy(found, weights, task):
    """Images whose two best logits are nearly equal may go either way, and there are few of them."""
    _, logits = plain.forward(weights, task.test.numpy())
    sure, unsure = 0, 0
    for of_image, label in zip(logits.tolist(), task.test_labels.tolist(), strict=True):
        first, second = sorted(of_image, reverse=True)[:2]
        if first - second < FLOAT16 * (first - min(of_image)):
            unsure += 1
        elif of_image[label] == first:
            sure += 1
    assert unsure <= 3
    assert sure <= round(found * len(logits)) <= sure + unsure


# The recording


@cases()
def test_the_recording_is_the_training_replayed(case):
    replay = case.replay
    for name, value in case.weights.items():
        assert_close(value, replay.final[name], bar=SUMS, what=name)  # snapshots are float32, not float16
    for layer in LAYERS:
        for found, expected in (
            (case.keys[layer], replay.keys[layer]),
            (case.values[layer], replay.values[layer]),
        ):
            sizes = np.linalg.norm(expected, axis=1)
            apart = np.linalg.norm(found - expected, axis=1)
            assert (apart <= FLOAT16 * sizes + 1e-9).all(), f"layer {layer}, slot {(apart - FLOAT16 * sizes).argmax()}"


@cases()
def test_accuracies(case):
    after = case.numbers["trained"]["accuracies"]
    assert len(after) == len(case.settings.phases)
    for name, task in case.tasks.items():
        assert_accuracy(after[0][name], case.replay.at_switch, task)
        assert_accuracy(after[-1][name], case.replay.final, task)
        assert case.numbers["datasets"][name]["accuracy"] == after[-1][name]
    assert case.numbers["verified"]
    assert after[0]["mnist" if "mnist" in case.settings.phases[0].datasets else "fashion-mnist"] > 0.5


@cases("joint")
def test_images_as_the_network_sees_them(case):
    for name, task in case.tasks.items():
        pixels = data.images(name, "train").pixels / 255
        assert_close(
            task.train.reshape(-1, 28, 28)[:5], (pixels[:5] - pixels.mean()) / pixels.std(ddof=1), bar=1e-6, what=name
        )
        assert len(task.train) == 1500
        assert len(task.test) == len(task.test_labels) == 120


# Table 1


@cases()
def test_table_1(case):
    for name, task, layer, _ in case.each():
        totals = plain.class_totals(abs(case.attention[name, layer]), case.labels)
        expected = plain.votes(totals, task.test_labels.tolist(), case.answers[name])
        assert case.numbers["datasets"][name]["table"][layer] == pytest.approx(expected), (name, layer)


@cases("single-task")
def test_table_1_with_raw_pixels(case):
    task = case.tasks["mnist"]
    keys = np.stack([task.train_pixels[sample].reshape(-1) / 255 for _, sample in case.images])
    totals = plain.class_totals(task.test_pixels.reshape(120, -1) / 255 @ keys.T, case.labels)
    expected = plain.votes(totals, task.test_labels.tolist(), case.answers["mnist"])
    assert case.numbers["datasets"]["mnist"]["raw pixels"] == pytest.approx(expected)


@cases("single-task")
def test_table_1_weighed_by_value(case):
    for name, task, layer, measured in case.each():
        assert ("weighed by value" in measured) == (layer != "0")
        if layer != "0":
            sizes = [math.sqrt(sum(x * x for x in value)) for value in case.values[layer].tolist()]
            totals = plain.class_totals(case.attention[name, layer] * sizes, case.labels)
            expected = plain.votes(totals, task.test_labels.tolist(), case.answers[name])
            assert measured["weighed by value"] == pytest.approx(expected), layer


@cases()
def test_table_1_with_contributions(case):
    for name, task in case.tasks.items():
        answers = case.answers[name]
        slopes = plain.backward(case.weights, case.queries[name], np.eye(10)[answers])
        for layer in LAYERS:
            pushes = slopes[layer] @ case.values[layer].T  # ⟨∂logit/∂output, value⟩
            scores = (case.attention[name, layer] + 1) * pushes  # the bias is a key that is always 1
            expected = plain.votes(plain.class_totals(scores, case.labels), task.test_labels.tolist(), answers)
            assert case.numbers["datasets"][name]["contribution votes"][layer] == pytest.approx(expected), (name, layer)


# What the paper says in words


@cases()
def test_the_best_slots(case):
    for name, task, layer, _ in case.each():
        sizes = abs(case.attention[name, layer])
        for query, slots in enumerate(case.best[name, layer]):
            assert len(slots) == 10
            assert_ranked(sizes[query], slots)
        some = case.dual.attend(task.test[:: case.settings.every])[layer].best(40, absolute=True).slots.tolist()
        assert len(some) == 12
        for query, slots in enumerate(some):
            assert_ranked(sizes[case.settings.every * query], slots)


@cases()
def test_how_often_the_best_slots_are_of_another_class(case):
    for name, task, layer, measured in case.each():
        best, labels = case.best[name, layer], task.test_labels.tolist()
        expected = plain.wrong_top(best, case.rows["label"], labels, case.answers[name])
        assert measured["wrong top"] == pytest.approx(expected), (name, layer)


@cases()
def test_images_that_are_often_among_the_best_three(case):
    for name, _, layer, measured in case.each():
        counts, found = plain.hubs(case.best[name, layer], case.images), measured["hubs"]
        assert found["images that are in some top 3"] == len(counts)
        assert found["images that fill half of all places"] == plain.fill_half(counts)
        label_of = dict(zip(case.images, case.rows["label"], strict=True))
        shares = [one["share of test images"] for one in found["most frequent"]]
        assert shares == pytest.approx([n / 120 for n in sorted(counts.values(), reverse=True)[:5]])
        for one in found["most frequent"]:
            image = (one["dataset"], one["sample_id"])
            assert counts[image] / 120 == pytest.approx(one["share of test images"])
            assert label_of[image] == one["label"]


@cases()
def test_when_the_best_slots_were_written(case):
    for name, task, layer, measured in case.each():
        some = case.dual.attend(task.test[:: case.settings.every])[layer].best(40, absolute=True).slots.tolist()
        for key, low, high in (("all", 0, 40), ("first", 0, 10), ("late", 20, 40)):
            slots = [slot for of_query in some for slot in of_query[low:high]]
            expected = plain.tenths(slots, case.rows["step"], case.settings.steps)
            assert measured["recency"][key] == pytest.approx(expected), (name, layer, key)
        assert measured["recency"]["chance"] == 0.1


@cases()
def test_the_right_class_and_its_rank(case):
    for name, task, layer, measured in case.each():
        totals = plain.class_totals(abs(case.attention[name, layer]), case.labels)
        shares, ranks = [], []
        for of_query, label in zip(totals.tolist(), task.test_labels.tolist(), strict=True):
            shares.append(of_query[label] / sum(of_query))
            ranks.append(sorted(of_query, reverse=True).index(of_query[label]) + 1)
        assert measured["depth"]["share of the right class"] == pytest.approx(plain.mean(shares), rel=SUMS)
        assert measured["depth"]["rank of the right class"] == pytest.approx(plain.mean(ranks))


@cases()
def test_attention_to_the_other_dataset(case):
    for name, _, layer, measured in case.each():
        if len(case.tasks) == 1:
            assert "cross-task" not in measured
            continue
        totals = {other: found.sum(1) for other, found in case.by_dataset(name, layer).items()}
        shares = sum(found for other, found in totals.items() if other != name) / sum(totals.values())
        assert measured["cross-task"] == pytest.approx(plain.mean(shares), rel=SUMS)
        others = [case.rows["dataset"][slot] != name for slots in case.best[name, layer] for slot in slots]
        assert measured["cross-task top"] == pytest.approx(plain.mean(others))


@cases()
def test_interference(case):
    for name, task, layer, measured in case.each():
        if case.settings.experiment != "continual":
            assert "interference" not in measured
            continue
        totals = {other: found.sum(1) for other, found in case.by_dataset(name, layer).items()}
        shares = totals["fashion-mnist"] / sum(totals.values())
        right = np.array(case.answers[name]) == task.test_labels.numpy()
        expected = {"right": plain.mean(shares[right]), "wrong": plain.mean(shares[~right]), "all": plain.mean(shares)}
        assert measured["interference"] == pytest.approx(expected, rel=SUMS), (name, layer)


# Single test examples


@cases()
def test_curves_and_totals_of_the_examples(case):
    assert len(case.analysis.examples) == len(case.numbers["examples"]) > 1
    for example in case.analysis.examples:
        name, place = example.rule.dataset, example.place
        assert example.label == int(case.tasks[name].test_labels[place])
        assert example.answer == case.answers[name][place]
        for layer, look in example.looks.items():
            sizes = abs(case.attention[name, layer][place])
            for group in ((d, label) for d in case.settings.datasets for label in range(10)):
                mine = [
                    size
                    for size, (dataset, _), label in zip(sizes, case.images, case.rows["label"], strict=True)
                    if (dataset, label) == group
                ]
                assert_close(look.curves[group], sorted(mine, reverse=True)[:40], bar=SUMS, what=f"{group}")
                assert look.totals[group] == pytest.approx(sum(mine), rel=SUMS)


@cases()
def test_matches_of_the_examples(case):
    visits = {}
    for image in case.images:
        visits[image] = visits.get(image, 0) + 1
    label_of = dict(zip(case.images, case.rows["label"], strict=True))
    assert max(visits.values()) > 1
    for example in case.analysis.examples:
        for layer, look in example.looks.items():
            weights = case.attention[example.rule.dataset, layer][example.place]
            for match in (*look.by_slot, *look.by_image):
                assert match.visits == visits[match.dataset, match.sample_id]
                assert match.label == label_of[match.dataset, match.sample_id]
            where = {(s, *image): n for n, (s, image) in enumerate(zip(case.rows["step"], case.images, strict=True))}
            slots = [where[m.step, m.dataset, m.sample_id] for m in look.by_slot]
            assert len(slots) == 10
            assert_ranked(abs(weights), slots)
            assert_close([m.weight for m in look.by_slot], weights[slots], bar=SUMS)
            sums = ranking.totals(abs(weights).tolist(), case.images)
            places = [list(sums).index((m.dataset, m.sample_id)) for m in look.by_image]
            assert len(places) == 10
            assert_ranked(list(sums.values()), places, [m.weight for m in look.by_image])
            assert all(m.step is None for m in look.by_image)


@cases("joint")
def test_negative_weights_count_by_their_size(case):
    """In layer 0 products may be negative: a test image that looks most at its opposites."""
    name = "fashion-mnist"
    weights = case.attention[name, "0"]
    place = int((-weights.min(1) / weights.max(1)).argmax())
    rule = next(example.rule for example in case.analysis.examples if example.rule.dataset == name)
    answers = {other: torch.tensor(found) for other, found in case.answers.items()}
    (example,) = examples.look(case.dual, case.settings, case.tasks, {rule: (place, True)}, answers)
    found = example.looks["0"]
    assert any(match.weight < 0 for match in found.by_slot)
    sums = ranking.totals(abs(weights[place]).tolist(), case.images)
    signed = ranking.totals(weights[place].tolist(), case.images)
    places = [list(sums).index((match.dataset, match.sample_id)) for match in found.by_image]
    assert any(list(signed.values())[one] < 0 for one in places)
    assert_ranked(list(sums.values()), places, [match.weight for match in found.by_image])


@cases()
def test_examples_as_plain_data(case):
    for told, example in zip(case.numbers["examples"], case.analysis.examples, strict=True):
        assert told["test image"] == example.place
        assert told["fits the rule"] == example.fitted
        for layer, look in example.looks.items():
            plainly = told["layers"][layer]
            assert [m["sample_id"] for m in plainly["best slots"]] == [m.sample_id for m in look.by_slot[:3]]
            assert [m["weight"] for m in plainly["best images"]] == [m.weight for m in look.by_image[:3]]
            assert plainly["totals"] == {f"{name} {label}": total for (name, label), total in look.totals.items()}


@cases()
def test_the_split_of_an_example_s_logit(case):
    for told, example in zip(case.numbers["examples"], case.analysis.examples, strict=True):
        name, place = example.rule.dataset, example.place
        inputs, logits = plain.forward(case.weights, case.tasks[name].test[place : place + 1].numpy())
        slopes = plain.backward(case.weights, inputs, np.eye(10)[[example.answer]])
        begin = network(case.settings).state_dict()  # SGD without decay keeps it
        for layer in LAYERS:
            split = told["contributions"][layer]
            scores = (case.keys[layer] @ inputs[layer][0] + 1) * (case.values[layer] @ slopes[layer][0])
            sizes = abs(scores).sum()
            of = np.array(case.rows["dataset"])
            for other in case.settings.datasets:
                expected = plain.class_totals(scores[None, of == other], case.labels[of == other])[0]
                assert abs(split["totals"][other] - expected).max() <= SUMS * sizes
            start = begin[f"{layer}.weight"].numpy() @ inputs[layer][0] + begin[f"{layer}.bias"].numpy()
            assert split["initial"] == pytest.approx(float(slopes[layer][0] @ start), abs=1e-4)
            assert split["logit"] == pytest.approx(logits[0, example.answer], abs=1e-4)
            slots = sum(sum(part) for part in split["totals"].values())
            assert split["initial"] + slots + split["remainder"] == pytest.approx(split["logit"], abs=1e-4)
        assert abs(split["remainder"]) < FLOAT16 * sizes  # the last layer's is exact but for float16


# Continual learning


@cases(*CONTINUAL)
def test_accuracies_of_masked_networks(case):
    replay = case.replay
    networks = {"no mask": replay.final, "after the first task": replay.at_switch}
    for words, layers in SUBSETS.items():
        masked = {name: value for name, value in replay.first_only.items() if name.split(".")[0] in layers}
        networks[words] = {**replay.final, **masked}
    assert set(case.numbers["masks"]) == set(networks)
    for words, weights in networks.items():
        for name, task in case.tasks.items():
            assert_accuracy(case.numbers["masks"][words][name], weights, task)
    found = case.numbers["masks"]
    assert found["all layers"]["mnist"] > found["no mask"]["mnist"] + 0.1


@cases(*CONTINUAL)
def test_what_the_mask_gives_back(case):
    replay, preset = case.replay, case.settings.preset
    begin = network(case.settings).state_dict()
    found = {line["parameter"]: line for line in case.numbers["given back"]}
    assert list(found) == list(begin)
    for name, line in found.items():
        moved = np.linalg.norm(replay.at_switch[name] - begin[name].numpy())
        apart = replay.first_only[name] - replay.at_switch[name]
        flight, buffer = np.zeros_like(apart), replay.buffer[name]
        for _ in range(case.settings.phases[1].steps):
            buffer = preset.momentum * buffer
            flight = flight - preset.lr * buffer
        assert np.linalg.norm(apart - flight) / moved < 1e-12  # the reference agrees with itself
        distance = line["from the network after the first task"]
        assert distance == pytest.approx(np.linalg.norm(apart) / moved, abs=FLOAT16)
        assert line["from that network with its momentum in flight"] < FLOAT16
        if case.settings.optimizer == "vanilla":
            assert distance < FLOAT16  # the network at the switch itself
        else:
            assert distance > 10 * FLOAT16


@cases(*CONTINUAL)
def test_the_misread_one_with_and_without_the_later_task(case):
    (one,) = (example for example in case.analysis.examples if example.rule.key == "one")
    image = case.tasks["mnist"].test[one.place : one.place + 1].numpy()
    found = case.numbers["the misread one"]
    for words, weights in (("as trained", case.replay.final), ("without the later task", case.replay.first_only)):
        _, logits = plain.forward(weights, image)
        assert found[words] == pytest.approx(plain.softmax(logits[0].tolist()), abs=FLOAT16), words
    assert torch.tensor(found["as trained"]).argmax() == one.answer


@cases("single-task", "joint")
def test_other_experiments_mask_nothing(case):
    assert not {"masks", "given back", "the misread one"} & set(case.numbers)
