"""The paper's image experiments, by loops: the training replayed, then every number from keys, values and rows."""

import math
from dataclasses import dataclass, field

import numpy as np

LAYERS = ("0", "2", "4")


def forward(weights, images):
    """The input of each linear layer, and the logits, (n, …), for weights by parameter name."""
    inputs, x = {}, np.asarray(images, dtype=np.float64)
    for layer in LAYERS:
        inputs[layer] = x
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        if layer != LAYERS[-1]:
            x = np.maximum(x, 0)
    return inputs, x


def backward(weights, inputs, errors):
    """From ∂/∂logits (n, classes) to ∂/∂output of each layer, (n, d_out)."""
    found = {}
    for layer, above in zip(reversed(LAYERS), (None, *reversed(LAYERS)), strict=False):
        if above is not None:
            errors = (errors @ weights[f"{above}.weight"]) * (inputs[above] > 0)
        found[layer] = errors
    return found


@dataclass
class Replay:
    """A training done again, in float64: weights by parameter name."""

    final: dict
    at_switch: dict = field(default_factory=dict)
    """After the first phase."""
    buffer: dict = field(default_factory=dict)
    """The momentum then."""
    first_only: dict = field(default_factory=dict)
    """What the first phase's gradients alone have made: they keep acting through the momentum."""
    keys: dict = field(default_factory=dict)
    """By layer, (slots, d_in)."""
    values: dict = field(default_factory=dict)
    """By layer, (slots, d_out)."""


def replay(begin, batches, *, first_phase, lr, momentum, clip):
    """SGD on cross entropy. begin: weights by name; batches: (images, labels) of every step."""
    run = Replay({name: np.array(value, dtype=np.float64) for name, value in begin.items()})
    run.first_only = {name: value.copy() for name, value in run.final.items()}
    buffers = {name: np.zeros_like(value) for name, value in run.final.items()}
    of_first = {name: np.zeros_like(value) for name, value in run.final.items()}
    keys, errors = {layer: [] for layer in LAYERS}, {layer: [] for layer in LAYERS}
    for step, (images, labels) in enumerate(batches):
        inputs, logits = forward(run.final, images)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(labels)), labels] -= 1
        deltas = backward(run.final, inputs, p / len(labels))
        gradients = {}
        for layer in LAYERS:
            gradients[f"{layer}.weight"] = deltas[layer].T @ inputs[layer]
            gradients[f"{layer}.bias"] = deltas[layer].sum(0)
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        for name, gradient in gradients.items():
            buffers[name] = momentum * buffers[name] + factor * gradient
            of_first[name] = momentum * of_first[name] + (factor * gradient if step < first_phase else 0)
            run.final[name] = run.final[name] - lr * buffers[name]
            run.first_only[name] = run.first_only[name] - lr * of_first[name]
        still = sum(
            momentum**later for later in range(len(batches) - step)
        )  # this gradient acts now, and in every later step
        for layer in LAYERS:
            keys[layer].append(inputs[layer])
            errors[layer].append(-lr * still * factor * deltas[layer])
        if step + 1 == first_phase:
            run.at_switch, run.buffer = dict(run.final), dict(buffers)
    run.keys = {layer: np.concatenate(found) for layer, found in keys.items()}
    run.values = {layer: np.concatenate(found) for layer, found in errors.items()}
    return run


def class_totals(scores, classes, count=10):
    """Σ of the scores of each class's slots. scores (queries, slots), classes (slots,) → (queries, classes)."""
    totals = np.zeros((len(scores), count))
    for label in range(count):
        totals[:, label] = scores[:, classes == label].sum(1)
    return totals


def votes(totals, labels, answers):
    """Table 1, in percent."""
    agree = {"target_wrong": [], "output_wrong": [], "right": []}
    for of_query, label, answer in zip(totals, labels, answers, strict=True):
        elected = max(range(len(of_query)), key=lambda c: of_query[c])
        if label == answer:
            agree["right"].append(elected == label)
        else:
            agree["target_wrong"].append(elected == label)
            agree["output_wrong"].append(elected == answer)
    return {column: 100 * mean(found) for column, found in agree.items()}


def wrong_top(best, slot_labels, labels, answers):
    """best: for each query its slots, best first."""
    first, three, ten = [], [], []
    for slots, label, answer in zip(best, labels, answers, strict=True):
        if label == answer:
            others = [slot_labels[slot] != label for slot in slots]
            first.append(others[0])
            three.append(any(others[:3]))
            ten += others[:10]
    return {
        "best slot of another class": mean(first),
        "one of the best three of another class": mean(three),
        "share of the best ten of another class": mean(ten),
    }


def hubs(best, slot_images):
    """How many queries have each image among their first three: {image: queries}. slot_images: (dataset, sample) of each slot."""
    counts = {}
    for slots in best:
        for image in {slot_images[slot] for slot in slots[:3]}:
            counts[image] = counts.get(image, 0) + 1
    return counts


def fill_half(counts):
    """How many of the most frequent are needed for half of all."""
    total, needed = 0, 0
    for count in sorted(counts.values(), reverse=True):
        if 2 * total >= sum(counts.values()):
            break
        total, needed = total + count, needed + 1
    return needed


def tenths(slots, slot_steps, steps):
    """The share of some slots that each tenth of the training has written."""
    counts = [0] * 10
    for slot in slots:
        counts[math.floor(10 * slot_steps[slot] / steps)] += 1
    return [count / len(slots) for count in counts]


def softmax(logits):
    """Of one image's logits."""
    powers = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(powers) for x in powers]


def mean(found):
    """nan of nothing."""
    return float(sum(found) / len(found)) if len(found) else math.nan
