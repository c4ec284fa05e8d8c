"""The batch of an iteration: fetched, shaped, and split into mini-batches and micro-batches.

Rule: a split follows from the samples' lengths and the seed alone, so that every rank computes the same one.
"""
