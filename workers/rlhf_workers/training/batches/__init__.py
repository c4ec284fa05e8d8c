"""The batch of an iteration: fetched, shaped, and split into mini-batches and micro-batches.

Rule: a split depends on data that all ranks share, such as the seed and the samples' lengths, so every rank computes
the same one.
"""
