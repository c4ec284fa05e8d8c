"""Checkpoints of a training rank: weights, optimizer state, files beside them, and the draft model.

Rule: a file is whole or has a temporary name; the coordinator makes a checkpoint of the files of all ranks.
"""
