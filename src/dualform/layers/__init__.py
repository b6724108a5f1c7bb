"""Layer types: which tensor is the key, and which of its axes are the rows. Used when recording and when asking."""
