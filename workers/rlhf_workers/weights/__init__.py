"""Transfers weights from training ranks to other workers, and reads and writes weight files.

docs/weights.md lists the steps of one tensor, each with its module. Rule: a reader gets all tensors of one version, or
an error.
"""
