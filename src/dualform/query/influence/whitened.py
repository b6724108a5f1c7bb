"""The whitened method: inner products with slots, the inverse curvature between them."""

from __future__ import annotations

from dualform.curvature.sums import DAMPING
from dualform.query.influence.factors import factors
from dualform.query.influence.problem import Problem
from dualform.query.influence.products import whitened_products
from dualform.query.influence.scores import LinearScores


def whitened_scores(problem: Problem) -> LinearScores:
    """Return −[x_qᵀ (A + αI)⁻¹ x_i] · [g_qᵀ (S + βI)⁻¹ e_i] / positions, summed over linear maps."""
    damping = problem.damping or DAMPING
    curvatures = factors(
        problem.store,
        problem.layers,
        problem.segments,
        problem.loss_mean,
        problem.progress,
    )
    products = []
    norms = []
    for question, by_layer in zip(problem.questions, curvatures, strict=True):
        whitened = {}
        for name, curvature in by_layer.items():
            maps = zip(question[name], curvature.maps, strict=True)
            whitened[name] = [whitened_products(query, known, damping) for query, known in maps]
        products.append(whitened)
        norms.append({name: curvature.norms for name, curvature in by_layer.items()})
    return LinearScores(
        problem.store,
        problem.segments,
        problem.loss_mean,
        problem.dtype,
        products,
        norms,
    )
