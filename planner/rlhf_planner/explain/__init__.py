"""Explains why an iteration takes as long as it does: recorded facts in, ranked findings out. Rule: pure."""
