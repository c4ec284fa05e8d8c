"""The batch of an iteration: fetched, shaped, and split into mini-batches and micro-batches.

Rule: a split depends on data that all ranks share, such as the samples' lengths, so ranks compute the same one.
"""
