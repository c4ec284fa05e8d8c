"""States of a job built by hand, for tests of the scheduler.

Defines how a worker registers and a sample finishes in them; makes no decisions.
"""

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import VersionSpan
from rlhf_common.worker_roles import WIRE
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling import iteration
from rlhf_coordinator.state.fleet import Fleet
from rlhf_coordinator.state.fusion_state import fusion_state
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse, SampleState
from rlhf_coordinator.state.worker import CommandKind, PendingCommand

NOW = 100.0
KINDS = {"generation": ("actor",), "inference": ("critic",), "training": ()}
"""Group -> models whose weights its workers have."""


def ready_state(
    context: JobContext, at: int = 0, *, version: int | None = None, absent: tuple[str, ...] = ()
) -> JobState:
    """Return a state in which all workers are ready with the weights of iteration `at` (or `version`)."""
    size = context.spec.rollout.batch_size
    ledger = Ledger(at, size, context.tasks, 1)
    state = JobState(Fleet(context.spec, NOW), ledger, fusion_state(context.spec), [4] * size, range(1, size + 1))
    for number, worker in enumerate(state.fleet, start=1):
        if worker.name in absent:
            continue
        has = at if version is None else version
        versions = dict.fromkeys(KINDS[worker.group.value], has)
        reported = pb.WorkerState(roles=[WIRE[worker.group]], versions=versions, trained_version=has, group_epoch=1)
        register = pb.Register(
            worker=worker.name,
            group=worker.group.value,
            index=worker.index,
            incarnation=f"{number}",
            address=f"host:{number}",
            rendezvous="host:1",
            state=reported,
            accumulates=True,
            draws_by_request=True,
        )
        state.fleet.register(register, number, NOW)
    state.group_epoch = 1
    return state


def finish_all(state: JobState, *, score: bool = True) -> None:
    """Finish every queued sample with a response of one token, and score it too."""
    for sample in [sample for sample in state.ledger.samples if sample.state is SampleState.QUEUED]:
        response = PackedResponse(b"\1\0\0\0", b"\0\0\0\0", (VersionSpan(state.iteration, 1),))
        state.ledger.finish(sample.index, state.ledger.assign(sample.index, "w"), "w", response, "stop", "")
        for task in sorted(sample.open_tasks) if score else ():
            state.ledger.score(
                sample.index, state.ledger.assign_scores(sample.index, [task], "w"), "w", task, b"\0" * 4
            )


def decided(context: JobContext, state: JobState, now: float) -> list[d.Decision]:
    """Return the scheduler's decisions."""
    return list(iteration.decide(context, state, now).decisions)


def kinds(decisions: list[d.Decision]) -> list[str]:
    """Return the class names of the decisions."""
    return [type(decision).__name__ for decision in decisions]


def pend(state: JobState, name: str, work: CommandKind, **fields: object) -> None:
    """Give worker `name` a command of this kind in progress."""
    state.fleet.workers[name].pending[99] = PendingCommand(work, NOW, "do it", **fields)  # type: ignore[arg-type]
