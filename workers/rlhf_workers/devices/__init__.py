"""The device of a worker: opening it, turns on it, copies to and from it, and reproducible sums.

Rule: modules of this package do not import each other.
"""
