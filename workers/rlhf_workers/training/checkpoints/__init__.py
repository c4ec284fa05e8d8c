"""Checkpoints of a training rank: weights, optimizer state, companion files, and the draft model.

Rule: a file is complete or has a temporary name. The coordinator assembles a checkpoint from the files of all ranks.
"""
