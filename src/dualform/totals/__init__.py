"""Totals: sums over groups of slots, kept while recording or built from slots later.

Key sums answer how much attention a group receives; group deltas are a group's part of the weights, and answer
contributions and masks. Neither grows with the number of steps.

- What is folded: `stretch` (slots and updates of a stretch of training), `groups` (numbers groups), `stored_updates` (updates of a finished run).
- Folding: `fold` (`Accumulated`: key sums, and deltas where coefficients are numbers), `elementwise` (where they are matrices),
  `written` (what slots wrote, by group), `group_tensors` (tensors with a row for each group), `rounding` and `sums`.
- `build`: totals from the slots of a finished recording.
"""
