"""Explains why an iteration takes as long as it does: recorded facts in, ranked findings out.

Rule: pure. A finding without a replay, a fit or measured times behind its gain says that the gain is unknown.
"""
