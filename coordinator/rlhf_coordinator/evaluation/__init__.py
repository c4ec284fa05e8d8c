"""Evaluation during training: a weight version answers prompts; the responses are scored, never trained on.

The samples of an evaluation have their own ledger (`state.evaluation_state`).
"""
