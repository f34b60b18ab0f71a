"""A busy engine: which cells run, and what do answers and counters show of each."""
