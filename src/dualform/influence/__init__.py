"""Influence: the algebra of what would change, estimated from keys, error signals and their curvature."""
