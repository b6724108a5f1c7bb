"""Curvature of the linear maps inside layers, and the mean that a loss takes: recording counts it, influence uses it."""
