"""Which generation workers score, and which keep the tail: functions of the ledger, the choice and the fleet alone.

A generation worker that may score holds the scoring models beside the policy. It is *released* when it has nothing left
to decode and will get nothing: outside the pool once the tail gathers, in the pool once nothing is queued, and all of
them when every response is finished. Without fusion that last rule is the only one, and only where there are no
inference workers. Released workers and inference workers share one queue.
Rule: pure; nothing is remembered, so a lost worker or a restarted coordinator finds the same answer or a better one.
"""

from collections.abc import Collection
from typing import Final

from rlhf_api.names import Group
from rlhf_coordinator.scheduling import weights
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import CommandKind, Worker
from rlhf_planner.inter_stage.balance import balance
from rlhf_planner.inter_stage.tail_placement import Move, TailPlacement, UnfinishedSample, place_tail

SPREAD: Final = 1.5
"""The fullest worker has this many times the samples of the emptiest, or nothing is balanced."""
COOLDOWN_SECONDS: Final = 2.0
"""A worker that gave or took samples is left alone for so long: what it was predicted to gain shows first."""


def possible(context: JobContext, state: JobState) -> bool:
    """Inter-stage fusion may be chosen: there is somebody to release, and something that can begin before the end."""
    several = state.fleet.sizes[Group.GENERATION] > 1
    overlaps = context.spec.inference.overlap != "Disabled"
    wanted = context.spec.fusion.inter_stage.mode != "Disabled" and not state.fusion.given_up
    return wanted and several and overlaps and bool(context.tasks)


def doubles(context: JobContext, state: JobState) -> bool:
    """Generation workers hold the scoring models too."""
    alone = not state.fleet.sizes.get(Group.INFERENCE, 0)
    return bool(context.tasks) and (alone or possible(context, state))


def measuring(context: JobContext, state: JobState) -> bool:
    """The costs of work are wanted, not known, and nothing is decoded that would be held up: they are measured now."""
    fusion = state.fusion
    if fusion.measured or context.spec.fusion.inter_stage.mode != "Auto" or state.stop is not None or state.trained:
        return False
    busy = state.ledger.count(SampleState.DECODING, SampleState.MIGRATING) or state.ledger.all_generated
    return possible(context, state) and not busy


def fuses(context: JobContext, state: JobState) -> bool:
    """The tail of this iteration is to gather on fewer workers than there are."""
    choice = state.fusion.choice
    return bool(choice.threshold) and choice.pool < state.fleet.sizes[Group.GENERATION] and possible(context, state)


def gathering(context: JobContext, state: JobState) -> bool:
    """So few samples are unfinished that they belong on the pool. What is queued then fits there too."""
    choice = state.fusion.choice
    if not fuses(context, state):
        return False
    room = choice.pool * context.spec.generation.max_batch_size
    return 0 < state.ledger.unfinished <= min(choice.threshold, room)


def decoders(context: JobContext, state: JobState) -> list[Worker]:
    """Generation workers that can be given samples now, by index."""
    both = doubles(context, state)
    return [
        worker
        for worker in state.fleet.of(Group.GENERATION)
        if weights.current(context, state, worker, Group.GENERATION) and (not both or Group.INFERENCE in worker.roles)
    ]


def placement(context: JobContext, state: JobState) -> TailPlacement:
    """Once the tail gathers: who keeps it, and what has to move there. What leaves a worker already is not its own."""
    ledger, choice, fusion = state.ledger, state.fusion.choice, state.fusion
    ready = [worker.name for worker in decoders(context, state)]
    kept = {name: _kept(state, name) if ledger.decoding_on(name) else [] for name in ready}
    holders = [name for name in ready if kept[name] or ledger.arriving_on(name)]
    if len(holders) <= choice.pool:
        settled = sum(len(kept[name]) + ledger.arriving_on(name) for name in holders)
        spare = sorted(set(ready) - set(holders), key=lambda name: (ledger.scoring_on(name), name))
        more = spare[: choice.pool - len(holders)] if settled < ledger.unfinished else []
        return TailPlacement(tuple(sorted([*holders, *more])), ())
    held = {name: [unfinished(state, index) for index in (*kept[name], *ledger.bound_for(name))] for name in ready}
    return place_tail(held, choice.pool, fusion.costs, fusion.lengths, choice.transfer)


def balancing(context: JobContext, state: JobState, now: float) -> tuple[Move, ...]:
    """Before the threshold, once nothing is queued: from the worker that would be last to one that would run dry."""
    ledger, fusion, settings = state.ledger, state.fusion, context.spec.fusion.inter_stage
    if (
        settings.balance == "Disabled"
        or not fusion.measured
        or now < fusion.next_balance
        or not possible(context, state)
    ):
        return ()
    if ledger.count(SampleState.QUEUED, SampleState.MIGRATING) or ledger.all_generated:
        return ()
    held = {worker.name: _kept(state, worker.name) for worker in decoders(context, state)}
    counts = [len(samples) for samples in held.values()]
    if len(counts) < 2 or max(counts) < 2 or max(counts) < SPREAD * min(counts):
        return ()
    resting = {name for name, moment in fusion.moved_at.items() if now - moment < COOLDOWN_SECONDS}
    samples = {name: [unfinished(state, index) for index in indices] for name, indices in held.items()}
    return balance(samples, fusion.costs, fusion.lengths, settings.transfer, resting)


def unfinished(state: JobState, index: int) -> UnfinishedSample:
    """A sample as the planner sees it."""
    tokens = len(state.ledger.samples[index].response)
    return UnfinishedSample(index, state.prompt_tokens[index], tokens, state.prompt_lines[index])


def _kept(state: JobState, name: str) -> list[int]:
    """Samples it decodes and was not asked to give away."""
    samples = state.ledger.samples
    return [index for index in state.ledger.held_by(name) if samples[index].state is SampleState.DECODING]


def released(context: JobContext, state: JobState, pool: Collection[str]) -> list[Worker]:
    """Generation workers that score now; `pool`: the workers that keep the tail, none when it does not gather."""
    ledger = state.ledger
    if state.trained or not doubles(context, state):
        return []
    alone = not state.fleet.sizes.get(Group.INFERENCE, 0)
    if ledger.all_generated:
        if not alone and not fuses(context, state):
            return []
    elif not pool:
        return []
    loose = ledger.count(SampleState.QUEUED, SampleState.MIGRATING) > 0
    return [
        worker
        for worker in decoders_and_scorers(context, state)
        if not (ledger.decoding_on(worker.name) or ledger.arriving_on(worker.name))
        and not (loose and worker.name in pool)
    ]


def decoders_and_scorers(context: JobContext, state: JobState) -> list[Worker]:
    """Generation workers with both roles and the iteration's policy; one that loads a scoring model counts too."""
    return [
        worker
        for worker in state.fleet.of(Group.GENERATION)
        if worker.connected
        and worker.roles >= {Group.GENERATION, Group.INFERENCE}
        and worker.versions.get(context.graph.policy) == state.version
        and (worker.slow_command is None or worker.slow_command.kind is CommandKind.LOAD)
    ]
