"""Checkpoints of a training rank: weights, optimizer state, companion files, and the draft model.

The coordinator assembles a checkpoint from the files of all ranks.
"""
