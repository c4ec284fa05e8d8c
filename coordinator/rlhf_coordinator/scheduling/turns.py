"""Whose turn it is on the device of a worker that decodes and also holds a training rank (spec.placement Colocated).

Training has it until the rank is at the job's version (its group forms, replays) and knows what its stages cost, and
again from the moment a batch is scored until it is trained; decoding and scoring have it in between. The worker puts
the other side to sleep by itself when a command comes; what is decided here is which commands are sent at all.
Rule: pure, and of one worker at a time: its rank tells all that matters.
"""

from rlhf_api.names import Group
from rlhf_coordinator.state.job_state import JobState
from rlhf_coordinator.state.worker import Worker


def decodes(state: JobState, worker: Worker) -> bool:
    """It may be asked to decode and score; always so for a worker without a rank, never for one that is only a rank."""
    if worker.rank is None:
        return True
    if worker.group is not Group.GENERATION:
        return False
    batch_waits = state.ledger.all_scored and not state.trained
    ready = worker.trains and worker.train_failure is None and worker.trained_version == state.version
    return ready and not batch_waits and state.schedule.stage != "stages"
