"""Transfers weights between workers, moves them between host and device, and reads and writes weight files.

Rule: a fetch of a version returns every tensor of its sources, or an error.
"""
