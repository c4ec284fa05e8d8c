"""Reward sources, one module per kind, listed in `registry`; functions and endpoints run while models score."""
