"""Sends a command to a worker: from that moment it is pending, until it is answered or the worker's session ends.

Rule: every command but Exit goes out by here, so that what a worker was asked is always known.
"""

import time

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.worker import PendingCommand


def send(run: JobRun, worker: str, command: pb.Command, pending: PendingCommand) -> None:
    """Number the command and queue it; a worker that is gone is asked again when it is back."""
    command.id = next(run.command_ids)
    receiver = run.state.fleet.workers[worker]
    pending.sent = receiver.last_progress = time.monotonic()
    receiver.pending[command.id] = pending
    run.sessions.send(worker, pb.CoordinatorMessage(command=command))
