"""The paper's language experiments: which training text a prediction rests on (section 5.5, appendix C)."""
