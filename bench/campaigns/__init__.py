"""The campaigns of `make torture`. docs/reliability.md says what each of them does; bench/torture.py runs them."""
