"""Losses and advantages of the algorithms: pure functions of tensors and numbers, without models or processes.

Conventions: B samples, T response positions, n concatenated trained tokens of a micro-batch. `mask` is true for trained
response tokens, and false for padding and tokens of abstained samples.
"""
