"""The truth, dull and slow: float64 loops that a reader believes at a glance. Fast code is compared with these."""
