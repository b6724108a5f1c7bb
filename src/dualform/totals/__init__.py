"""Totals: sums over groups of slots, kept while recording or built from slots later.

Key sums answer how much attention a group receives; group deltas are a group's part of the weights, and answer
contributions and masks. Neither grows with the number of steps.
"""
