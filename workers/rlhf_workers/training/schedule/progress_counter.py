"""How many pieces of training this process has finished: actions of schedule rows, and parts of optimizer steps.

Heartbeats tell the count, by which the coordinator tells a training step that is long from one that never ends: a
thread that waits for a lock, a kernel or a peer computes for ever as far as its clock says. A piece is an action on one
micro-batch of one stage, or what follows a mini-batch's last action, such as the sums of gradients.
Rule: the count only grows, is written by the compute thread alone and read by any. No decision of a worker reads it.
"""

_finished = 1
"""From 1, because 0 is what a worker that does not count says."""


def piece_finished() -> None:
    """Count one piece."""
    global _finished
    _finished += 1


def finished_pieces() -> int:
    """Return the count of this process, from 1."""
    return _finished
