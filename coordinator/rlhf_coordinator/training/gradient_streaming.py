"""Carries out gradient streaming: journals the order of the prompts, and asks ranks for the gradients of chunks.

Rule: an order is durable before a rank gets it, so a replay adds the same gradients in the same order.
"""

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling.decisions import Accumulate, StreamGroups
from rlhf_coordinator.state.streamed_work import StreamedWork
from rlhf_coordinator.state.worker import CommandKind, PendingCommand, Worker
from rlhf_coordinator.storage.journal_pb2 import Record, Streamed


def begin_iteration(run: JobRun) -> None:
    """Forget the work of the previous iteration."""
    run.state.streamed_work = StreamedWork()


def stream_groups(run: JobRun, decision: StreamGroups) -> None:
    """Journal the next prompts of the sum."""
    ledger = run.state.ledger
    if not ledger.streamed:
        text = f"iteration {ledger.iteration}: ranks begin with gradients while {ledger.unfinished} samples are decoded"
        run.event("gradients-streamed", text)
    run.journal.append(Record(streamed=Streamed(groups=decision.groups)))
    run.journal.commit()
    ledger.streamed.extend(decision.groups)


def accumulate(run: JobRun, decision: Accumulate) -> None:
    """Ask a rank for the gradients of the chunks so far."""
    order = pb.Accumulate(iteration=decision.iteration, chunks=decision.chunks)
    detail = f"compute gradients of {decision.chunks} chunks of iteration {decision.iteration}"
    send(run, decision.worker, pb.Command(accumulate=order), PendingCommand(CommandKind.ACCUMULATE, 0.0, detail))


def accumulated(run: JobRun, worker: Worker, result: pb.AccumulateResult) -> None:
    """Record the chunks that a rank has."""
    worker.streamed = result.iteration, result.chunks
    work = run.state.streamed_work
    if worker.rank == 0 and result.iteration == run.state.iteration and not run.state.ledger.all_generated:
        work.microbatches, work.seconds = work.microbatches + result.microbatches, work.seconds + result.seconds
