"""Lion, as libraries have it: PyTorch has none of its own."""

import torch


class Lion(torch.optim.Optimizer):
    """As lion-pytorch writes it."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                update = average.clone().mul_(beta1).add(p.grad, alpha=1.0 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1.0 - beta2)


class LerpingLion(Lion):
    """As timm writes it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient = -p.grad if group.get("maximize") else p.grad
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(gradient, 1 - beta2)
