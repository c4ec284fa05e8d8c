"""The device of a worker: opening it, whose turn it is, copies to and from it, and reproducible sums.

Rule: no module here imports another one of this package.
"""
