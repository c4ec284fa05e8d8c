"""Losses and advantages of the algorithms, one a file: pure functions of tensors, no models, no processes.

Conventions: B samples, T response positions, n response tokens of a micro-batch laid end to end. `mask` is true where a
trained response token is; tokens of abstained samples and padding are false, so they count in no mean and no sum.
"""
