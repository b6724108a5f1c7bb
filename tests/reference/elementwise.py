"""Optimizers that divide each gradient by its past size, as the documentation of torch.optim defines them, in float64.

Given these sizes, a weight is a sum of what every single gradient has made of it. `written` finds that for one part of one gradient by
walking through training with that part alone.
"""

import numpy as np


def sizes(kind, theta, gradients, *, lr, weight_decay, eps=1e-8, betas=(0.9, 0.999), alpha=0.99, rho=0.9, momentum=0.0,
          amsgrad=False, maximize=False):  # fmt: skip
    """Walk through training: the maps of all steps, and the weight at the end.

    A map is (keep, take, direct, through, sign, decay): g' = sign·g + decay·θ; m ← keep·m + take·g'; θ ← θ − direct·g' − through·m.
    """
    theta = np.array(theta, dtype=np.float64)
    m, v, largest, moved = (np.zeros_like(theta) for _ in range(4))
    sign = -1.0 if maximize else 1.0
    beta1, beta2 = betas
    product, maps = 1.0, []
    for t, gradient in enumerate(gradients, 1):
        g = sign * np.asarray(gradient, dtype=np.float64) + weight_decay * theta
        one, zero = np.ones_like(theta), np.zeros_like(theta)
        if kind == "Adam":
            v = beta2 * v + (1 - beta2) * g * g
            largest = np.maximum(largest, v)
            used = largest if amsgrad else v
            through = lr / (1 - beta1**t) / (np.sqrt(used / (1 - beta2**t)) + eps)
            found = (beta1, (1 - beta1) * one, zero, through)
        elif kind == "NAdam":
            v = beta2 * v + (1 - beta2) * g * g
            now = beta1 * (1 - 0.5 * 0.96 ** (t * 0.004))
            coming = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * 0.004))
            product *= now
            root = np.sqrt(v / (1 - beta2**t)) + eps
            found = (beta1, (1 - beta1) * one, lr * (1 - now) / (1 - product) / root,
                     lr * coming / (1 - product * coming) / root)  # fmt: skip
        elif kind == "RAdam":
            v = beta2 * v + (1 - beta2) * g * g
            most = 2 / (1 - beta2) - 1
            length = most - 2 * t * beta2**t / (1 - beta2**t)
            through = lr / (1 - beta1**t) * one
            if length > 5:
                rectified = np.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
                through = through * rectified * np.sqrt(1 - beta2**t) / (np.sqrt(v) + eps)
            found = (beta1, (1 - beta1) * one, zero, through)
        elif kind == "Adagrad":
            v = v + g * g
            found = (1.0, zero, lr / (np.sqrt(v) + eps), zero)
        elif kind == "RMSprop":
            v = alpha * v + (1 - alpha) * g * g
            root = np.sqrt(v) + eps
            found = (momentum, 1 / root, zero, lr * one) if momentum else (1.0, zero, lr / root, zero)
        elif kind == "Adadelta":
            v = rho * v + (1 - rho) * g * g
            ratio = np.sqrt(moved + eps) / np.sqrt(v + eps)
            moved = rho * moved + (1 - rho) * (ratio * g) ** 2
            found = (1.0, zero, lr * ratio, zero)
        elif kind == "Adamax":
            v = np.maximum(beta2 * v, np.abs(g) + eps)
            found = (beta1, (1 - beta1) * one, zero, lr / (1 - beta1**t) / v)
        maps.append((*found, sign, weight_decay))
        theta, m = step(maps[-1], theta, m, gradient)
    return maps, theta


def step(one, theta, m, gradient):
    keep, take, direct, through, sign, decay = one
    g = sign * gradient + decay * theta
    m = keep * m + take * g
    return theta - direct * g - through * m, m


def written(maps, place, part):
    """What a part of the gradient of one step has made of the weight by the end. Where the part is zero, that is zero."""
    there = part != 0
    theta, m = np.zeros_like(part), np.zeros_like(part)
    for t in range(place, len(maps)):
        with np.errstate(over="ignore", invalid="ignore"):  # in elements that are not asked for
            theta, m = step(maps[t], theta, m, part if t == place else np.zeros_like(part))
            theta, m = np.where(there, theta, 0.0), np.where(there, m, 0.0)
    return theta


def kept_from_the_beginning(maps, first):
    """What is left of the first weight. Where it is zero, nothing is."""
    there = np.asarray(first, dtype=np.float64) != 0
    theta, m = np.array(first, dtype=np.float64), np.zeros(np.shape(first))
    for one in maps:
        with np.errstate(over="ignore", invalid="ignore"):
            theta, m = step(one, theta, m, np.zeros_like(theta))
            theta, m = np.where(there, theta, 0.0), np.where(there, m, 0.0)
    return theta
