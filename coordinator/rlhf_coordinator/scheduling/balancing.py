"""Balancing: before the tail consolidates, samples move from the worker that would end last to one that would run dry.

Only once nothing is queued: until then the queue balances. Looking costs time too, so it is done at intervals
(`FusionState.next_balance`).
Rule: pure; nobody who gave or took samples a moment ago is asked again.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import Worker
from rlhf_planner.inter_stage.balance import balance
from rlhf_planner.inter_stage.tail_placement import Move, TailSample

SPREAD: Final = 1.5
"""The fullest worker has this many times the samples of the emptiest, or nothing is balanced."""
COOLDOWN_SECONDS: Final = 2.0
"""A worker that gave or took samples is left alone for so long: what it was predicted to gain shows first."""


def balancing_moves(context: JobContext, state: JobState, now: float, ready: Sequence[Worker]) -> tuple[Move, ...]:
    """Return the moves that shorten the decoding of the workers that are `ready` to decode; none when it is even."""
    ledger, fusion, settings = state.ledger, state.fusion, context.spec.fusion.inter_stage
    if settings.balance == "Disabled" or not fusion.measured or now < fusion.next_balance:
        return ()
    if ledger.count(SampleState.QUEUED, SampleState.MIGRATING) or ledger.all_generated:
        return ()
    held = {worker.name: staying_samples(state, worker.name) for worker in ready}
    counts = [len(samples) for samples in held.values()]
    if len(counts) < 2 or max(counts) < 2 or max(counts) < SPREAD * min(counts):
        return ()
    cooling = {name for name, moment in fusion.moved_at.items() if now - moment < COOLDOWN_SECONDS}
    samples = {name: [unfinished_sample(state, index) for index in indices] for name, indices in held.items()}
    return balance(samples, fusion.costs, fusion.lengths, settings.transfer, cooling)


def unfinished_sample(state: JobState, index: int) -> TailSample:
    """Return a sample as the planner sees it."""
    tokens = len(state.ledger.samples[index].response)
    return TailSample(index, state.prompt_tokens[index], tokens, state.prompt_lines[index])


def staying_samples(state: JobState, name: str) -> list[int]:
    """Return the samples that a worker decodes and was not asked to give away."""
    samples = state.ledger.samples
    return [index for index in state.ledger.held_by(name) if samples[index].state is SampleState.DECODING]
