"""Sends a command to a worker; it is pending until it is answered or the worker's session ends.

Rule: every command but Exit is sent from here, so that the pending commands of a worker are always known.
"""

import time

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.worker import PendingCommand


def send(run: JobRun, worker: str, command: pb.Command, pending: PendingCommand) -> None:
    """Number the command and queue it; the scheduler asks a disconnected worker again when it returns."""
    command.id = next(run.command_ids)
    receiver = run.state.fleet.workers[worker]
    pending.sent = receiver.last_progress = time.monotonic()
    receiver.pending[command.id] = pending
    run.sessions.send(worker, pb.CoordinatorMessage(command=command))
