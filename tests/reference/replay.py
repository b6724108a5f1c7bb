"""Every optimizer step by step, as the documentation of torch.optim defines it, in float64; and what becomes of parts of the gradients.

Given what it divides by, each update is linear. So the same divisions are applied to several tracks side by side: the first one is the training
itself; the others begin elsewhere (at zero, or at the first weight) and get a part of each gradient.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Track:
    """A weight and its running average m, driven by some of the gradients."""

    theta: np.ndarray
    m: np.ndarray = None

    def __post_init__(self):
        self.theta = np.array(self.theta, dtype=np.float64)
        if self.m is None:
            self.m = np.zeros_like(self.theta)


@dataclass
class Replay:
    """One parameter under one optimizer."""

    kind: str
    tracks: list
    """The first one is the training itself."""
    count: int = 0
    state: dict = field(default_factory=dict)

    def __post_init__(self):
        first = self.tracks[0].theta
        self.state = {name: np.zeros_like(first) for name in ("v", "largest", "mean", "moved")} | self.state
        self.product = 1.0

    def step(self, gradients, **s):
        """One update. gradients: one for each track; s: the settings of the parameter's group."""
        self.count += 1
        sign = -1.0 if s["maximize"] else 1.0
        decay = s["weight_decay"]
        decoupled = self.kind == "AdamW" or s.get("decoupled_weight_decay", False)
        pushed = []
        for track, gradient in zip(self.tracks, gradients, strict=True):
            g = sign * np.asarray(gradient, dtype=np.float64)
            if decoupled:
                track.theta *= 1 - s["lr"] * decay
            else:
                g = g + decay * track.theta
            pushed.append(g)
        getattr(self, f"_{self.kind.lower()}")(pushed, s)

    def _sgd(self, pushed, s):
        for track, g in zip(self.tracks, pushed, strict=True):
            if s["momentum"] == 0:
                track.theta -= s["lr"] * g
                continue
            track.m = g.copy() if self.count == 1 else s["momentum"] * track.m + (1 - s["dampening"]) * g
            track.theta -= s["lr"] * (g + s["momentum"] * track.m if s["nesterov"] else track.m)

    def _average(self, pushed, rate):
        for track, g in zip(self.tracks, pushed, strict=True):
            track.m = rate * track.m + (1 - rate) * g

    def _squares(self, g, rate):
        self.state["v"] = rate * self.state["v"] + (1 - rate) * g * g
        return self.state["v"]

    def _adam(self, pushed, s):
        beta1, beta2 = s["betas"]
        v = self._squares(pushed[0], beta2)
        if s["amsgrad"]:
            v = self.state["largest"] = np.maximum(self.state["largest"], v)
        self._average(pushed, beta1)
        root = np.sqrt(v / (1 - beta2**self.count)) + s["eps"]
        for track in self.tracks:
            track.theta -= s["lr"] * track.m / (1 - beta1**self.count) / root

    _adamw = _adam

    def _nadam(self, pushed, s):
        beta1, beta2 = s["betas"]
        v = self._squares(pushed[0], beta2)
        self._average(pushed, beta1)
        now, coming = (beta1 * (1 - 0.5 * 0.96 ** (t * s["momentum_decay"])) for t in (self.count, self.count + 1))
        self.product *= now
        root = np.sqrt(v / (1 - beta2**self.count)) + s["eps"]
        for track, g in zip(self.tracks, pushed, strict=True):
            direct = (1 - now) / (1 - self.product) * g
            through = coming / (1 - self.product * coming) * track.m
            track.theta -= s["lr"] * (direct + through) / root

    def _radam(self, pushed, s):
        beta1, beta2 = s["betas"]
        v = self._squares(pushed[0], beta2)
        self._average(pushed, beta1)
        most = 2 / (1 - beta2) - 1
        rest = 1 - beta2**self.count
        length = most - 2 * self.count * beta2**self.count / rest
        factor = np.ones_like(v)
        if length > 5:
            rectified = np.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
            factor = rectified * np.sqrt(rest) / (np.sqrt(v) + s["eps"])
        for track in self.tracks:
            track.theta -= s["lr"] * track.m / (1 - beta1**self.count) * factor

    def _adagrad(self, pushed, s):
        if self.count == 1:
            self.state["v"] = self.state["v"] + s["initial_accumulator_value"]
        self.state["v"] = self.state["v"] + pushed[0] ** 2
        rate = s["lr"] / (1 + (self.count - 1) * s["lr_decay"])
        for track, g in zip(self.tracks, pushed, strict=True):
            track.theta -= rate * g / (np.sqrt(self.state["v"]) + s["eps"])

    def _rmsprop(self, pushed, s):
        v = self._squares(pushed[0], s["alpha"])
        if s["centered"]:
            self.state["mean"] = s["alpha"] * self.state["mean"] + (1 - s["alpha"]) * pushed[0]
            v = v - self.state["mean"] ** 2
        root = np.sqrt(v) + s["eps"]
        for track, g in zip(self.tracks, pushed, strict=True):
            if s["momentum"] > 0:
                track.m = s["momentum"] * track.m + g / root
                track.theta -= s["lr"] * track.m
            else:
                track.theta -= s["lr"] * g / root

    def _adadelta(self, pushed, s):
        v = self._squares(pushed[0], s["rho"])
        ratio = np.sqrt(self.state["moved"] + s["eps"]) / np.sqrt(v + s["eps"])
        self.state["moved"] = s["rho"] * self.state["moved"] + (1 - s["rho"]) * (ratio * pushed[0]) ** 2
        for track, g in zip(self.tracks, pushed, strict=True):
            track.theta -= s["lr"] * ratio * g

    def _adamax(self, pushed, s):
        beta1, beta2 = s["betas"]
        self.state["v"] = np.maximum(beta2 * self.state["v"], np.abs(pushed[0]) + s["eps"])
        self._average(pushed, beta1)
        for track in self.tracks:
            track.theta -= s["lr"] / (1 - beta1**self.count) * track.m / self.state["v"]
