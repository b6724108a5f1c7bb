"""SGD step by step, as the documentation of torch.optim.SGD defines it."""

import numpy as np


def step(theta, gradient, buffer, *, lr, momentum, dampening, weight_decay, nesterov, maximize):
    """One update of one parameter: (θ_t, b_t) from (θ_{t−1}, b_{t−1}); b is None before the first."""
    g = -gradient if maximize else gradient
    if weight_decay != 0:
        g = g + weight_decay * theta
    if momentum != 0:
        buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
        g = g + momentum * buffer if nesterov else buffer
    return theta - lr * g, buffer


def run(theta, gradients, settings, buffer=None):
    """All updates, one after the other; settings: one dictionary for each gradient."""
    theta = np.asarray(theta, dtype=np.float64)
    for gradient, setting in zip(gradients, settings, strict=True):
        theta, buffer = step(theta, np.asarray(gradient, dtype=np.float64), buffer, **setting)
    return theta, buffer
