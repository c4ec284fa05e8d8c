"""Counts the finished units of training work in this process: actions of schedule rows, and other parts of training.

Heartbeats carry the count, which lets the coordinator distinguish a long training step from a hang: a thread that waits
for a lock, a kernel or a peer looks busy by its clock. A unit is an action on one micro-batch of one stage, or a part
of the work before or after a mini-batch's actions, such as the sums of gradients.
Rule: the count only grows. The compute thread writes it and any thread reads it. No decision of a worker depends on it.
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
