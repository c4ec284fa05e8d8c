"""The batch of an iteration: fetched, shaped, and split into mini-batches and micro-batches.

Rule: a split depends on the samples' lengths and the seed only, so that every rank computes the same one.
"""
