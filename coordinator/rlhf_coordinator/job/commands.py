"""Sends a command to a worker, and records it as pending."""

import time

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.worker import PendingCommand


def send(run: JobRun, worker: str, command: pb.Command, pending: PendingCommand) -> None:
    """Number the command, record it as pending now, and queue it; without a session the message is dropped."""
    command.id = next(run.command_ids)
    receiver = run.state.fleet.workers[worker]
    pending.sent = receiver.last_progress = time.monotonic()
    receiver.pending[command.id] = pending
    run.sessions.send(worker, pb.CoordinatorMessage(command=command))
