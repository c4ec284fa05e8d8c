"""Reward sources: one module per kind, found in `registry`; functions and endpoints are called while models score."""
