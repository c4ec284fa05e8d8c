"""Counts the finished units of training work in this process.

Heartbeats carry the count, which lets the coordinator distinguish a long training step from a hang.

Rule: the count only grows.
"""

_finished = 1
"""Finished units, from 1, because a worker without training reports 0."""


def count_unit() -> None:
    """Count one finished unit."""
    global _finished
    _finished += 1


def finished_units() -> int:
    """Return the count of this process, from 1."""
    return _finished
