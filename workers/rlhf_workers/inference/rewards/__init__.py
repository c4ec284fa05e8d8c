"""Reward sources, one module per kind, listed in `registry`."""
