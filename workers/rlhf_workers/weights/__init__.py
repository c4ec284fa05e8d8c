"""Transfers weights from training ranks to other workers, and reads and writes weight files.

Rule: a reader gets all tensors of one version, or an error.
"""
