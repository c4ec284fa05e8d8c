"""How many units of work of training this process has finished: actions of schedule rows, and parts of optimizer steps.

Heartbeats carry the count. By it the coordinator tells a long training step from one that hangs: a thread that waits
for a lock, a kernel or a peer computes for ever as far as its clock says. A unit is an action on one micro-batch of one
stage, or what follows a mini-batch's last action, such as the sums of gradients.
Rule: the count only grows. The compute thread writes it and any thread reads it. No decision of a worker reads it.
"""

_finished = 1
"""From 1, because 0 is what a worker without training says."""


def count_unit() -> None:
    """Count one finished unit."""
    global _finished
    _finished += 1


def finished_units() -> int:
    """Return the count of this process, from 1."""
    return _finished
