"""Attention over slots, by loops over queries, slots and units."""

import numpy as np


def attention_weights(keys, queries):
    """α[q][t] = k_t · q, (queries, slots)."""
    weights = np.zeros((len(queries), len(keys)))
    for q in range(len(queries)):
        for t in range(len(keys)):
            for i in range(len(keys[t])):
                weights[q, t] += float(keys[t][i]) * float(queries[q][i])
    return weights


def attention(keys, values, query):
    """Attention(K, V, q) = Σ_t α_t v_t, (d_out,): definition 2.1."""
    total = np.zeros(len(values[0]))
    for key, value in zip(keys, values, strict=True):
        total = total + attention_weights([key], [query])[0, 0] * np.asarray(value, dtype=np.float64)
    return total


def sum_of_outer_products(values, keys):
    """Σ_t v_t ⊗ k_t, (d_out, d_in): equation 7."""
    total = np.zeros((len(values[0]), len(keys[0])))
    for value, key in zip(values, keys, strict=True):
        for i in range(len(value)):
            for j in range(len(key)):
                total[i, j] += float(value[i]) * float(key[j])
    return total


def contributions(keys, values, bias_values, queries, gradients):
    """⟨∂target/∂output, α_t·e_t + the bias's part⟩, (queries, slots), for queries at one position each."""
    weights = attention_weights(keys, queries)
    found = np.zeros_like(weights)
    for q in range(len(queries)):
        for t in range(len(keys)):
            for i in range(len(values[t])):
                added = weights[q, t] * float(values[t][i]) + float(bias_values[t][i])
                found[q, t] += float(gradients[q][i]) * added
    return found
