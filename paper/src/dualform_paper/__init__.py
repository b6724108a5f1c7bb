"""The paper's experiments, run through the public API, with our numbers beside theirs."""
