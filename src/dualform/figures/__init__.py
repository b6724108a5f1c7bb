"""Figures: drawn from results, never from a store, through Matplotlib's object interface alone."""
