"""Influence by the book: the gradient of every row by autograd, dense matrices, plain loops. Nothing is read from a store."""

import copy
import math

import numpy as np
import torch


def margin(output, unit):
    """log(p / (1 − p))."""
    others = [output[n] for n in range(len(output)) if n != unit]
    return output[unit] - torch.stack(others).logsumexp(0)


def at(model, checkpoint):
    """The model with the weights of a checkpoint."""
    found = copy.deepcopy(model)
    found.load_state_dict(checkpoint)
    return found.eval()


def gradients(model, inputs, loss):
    """∂loss/∂parameter by name, for one sample: arrays."""
    model.zero_grad()
    loss(model(inputs.unsqueeze(0))).backward()
    return {name: p.grad.detach().numpy().copy() for name, p in model.named_parameters()}


def rows(run, inputs, labels, steps):
    """(step, sample, gradients, 1 − p) of every row that was trained on in these steps."""
    found = []
    for step in steps:
        model = at(run.model, run.checkpoints[step])
        for sample in run.ids[step].tolist():
            of = gradients(
                model, inputs[sample], lambda y, s=sample: torch.nn.functional.cross_entropy(y, labels[s : s + 1])
            )
            with torch.no_grad():
                p = model(inputs[sample].unsqueeze(0)).softmax(1)[0, labels[sample]]
            found.append((step, sample, of, 1 - float(p)))
    return found


def flat(gradient):
    return np.concatenate([part.reshape(-1) for part in gradient.values()])


def kernel(run, inputs, labels, segment, moment, queries, units, damping=1.0):
    """The path kernel's scores, (queries, rows of the segment)."""
    begin, end = segment
    there = rows(run, inputs, labels, range(begin, end))
    model = at(run.model, run.checkpoints[moment])
    n = len(there)
    K = np.zeros((n, n))
    g = [-flat(of) / q for _, _, of, q in there]
    r = [(1 - q) * q for *_, q in there]
    for i in range(n):
        for j in range(n):
            K[i, j] = math.sqrt(r[i] * r[j]) * (g[i] @ g[j])
    K += damping * np.mean(np.diag(K)) * np.eye(n)
    found = []
    for x, unit in zip(queries, units, strict=True):
        of = flat(gradients(model, x, lambda y, u=unit: margin(y[0], u)))
        k = np.array([math.sqrt(r[i]) * (of @ g[i]) for i in range(n)])
        a = np.linalg.solve(K, k)
        found.append([a[i] * there[i][3] / math.sqrt(r[i]) for i in range(n)])
    return np.array(found)


def linear_map(model, name, gradient):
    """The gradient of a linear layer, its bias as a last column: (d_out, d_in + 1)."""
    return np.concatenate([gradient[f"{name}.weight"], gradient[f"{name}.bias"][:, None]], 1)


def whitened(run, inputs, labels, segment, moment, queries, units, layers, damping=0.3):
    """The whitened path's scores by layer, (layers, queries, rows of the segment), for linear layers with a bias."""
    begin, end = segment
    there = rows(run, inputs, labels, range(begin, end))
    model = at(run.model, run.checkpoints[moment])
    found = np.zeros((len(layers), len(queries), len(there)))
    for place, name in enumerate(layers):
        of_rows = [linear_map(model, name, of) for _, _, of, _ in there]
        # a gradient is error ⊗ (key, 1): its last column is the error signal, and each other one is that times the key
        errors = [G[:, -1] for G in of_rows]
        keys = [G.T @ e / (e @ e) for G, e in zip(of_rows, errors, strict=True)]
        A = sum(np.outer(k, k) for k in keys) / len(keys)
        S = sum(np.outer(e, e) for e in errors) / len(errors)
        A = A + damping * np.trace(A) / len(A) * np.eye(len(A))
        S = S + damping * np.trace(S) / len(S) * np.eye(len(S))
        for q, (x, unit) in enumerate(zip(queries, units, strict=True)):
            G = linear_map(model, name, gradients(model, x, lambda y, u=unit: margin(y[0], u)))
            W = np.linalg.inv(S) @ G @ np.linalg.inv(A)
            for i, of_row in enumerate(of_rows):
                found[place, q, i] = -np.sum(W * of_row)
    return found


def whitened_tokens(model, rows, queries, target, layers, ignored, damping=0.3):
    """The whitened path's scores by layer, (layers, queries, rows), of a network in which no position sees another.

    rows: inputs (positions, …) and labels (positions,) of each. The loss of a row is the sum over its positions that have a label.
    """
    gradients_of_tokens = []
    for given, labels in rows:
        of_row = []
        for place in range(len(labels)):
            if labels[place] == ignored:
                continue
            label = labels[place : place + 1]
            of_row.append(
                gradients(model, given, lambda y, p=place, n=label: torch.nn.functional.cross_entropy(y[:, p], n))
            )
        gradients_of_tokens.append(of_row)
    found = np.zeros((len(layers), len(queries), len(rows)))
    for layer, name in enumerate(layers):
        of_rows = [[linear_map(model, name, of) for of in tokens] for tokens in gradients_of_tokens]
        every = [G for tokens in of_rows for G in tokens]
        errors = [G[:, -1] for G in every]
        keys = [G.T @ e / (e @ e) for G, e in zip(every, errors, strict=True)]
        A = sum(np.outer(k, k) for k in keys) / len(keys)
        S = sum(np.outer(e, e) for e in errors) / len(errors)
        A = A + damping * np.trace(A) / len(A) * np.eye(len(A))
        S = S + damping * np.trace(S) / len(S) * np.eye(len(S))
        tokens_in_a_row = len(every) / len(rows)
        for q, x in enumerate(queries):
            G = linear_map(model, name, gradients(model, x, lambda y: target(y)[0]))
            W = np.linalg.inv(S) @ G @ np.linalg.inv(A) / tokens_in_a_row
            for row, tokens in enumerate(of_rows):
                found[layer, q, row] = -sum(np.sum(W * of_token) for of_token in tokens)
    return found
