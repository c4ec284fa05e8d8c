"""Weights on their way: from the ranks that train them to the workers that compute with them, and in files.

docs/weights.md lists the steps of one tensor, each with its module. Rule: a reader gets all tensors of one version, or
an error. Modules here never change a weight that someone else computes with.
"""
