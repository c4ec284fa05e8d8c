"""Incremental scoring: assigns prefixes of unfinished samples to idle scoring workers. Rule: pure.

Later prefixes of a sample go to the worker that has the earlier ones.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_api.score_blocks import BLOCK, incremental_tasks, whole_blocks
from rlhf_coordinator.scheduling.decisions import Decision, ScorePrefix
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import Worker

IN_FLIGHT: Final = 8
"""Most samples that a worker is asked for at a time."""
LEAD: Final = 2
"""Most samples by which a worker may exceed the least loaded one and still get the finished sample that it began."""
UNFINISHED: Final = (SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)


def is_possible(context: JobContext) -> bool:
    """Return whether the job allows early scoring and has tasks for it."""
    settings = context.spec.inference
    return (
        settings.incremental != "Disabled" and settings.overlap != "Disabled" and bool(incremental_tasks(context.tasks))
    )


def is_enabled(context: JobContext, state: JobState) -> bool:
    """Return whether prefixes are scored in this iteration."""
    return is_possible(context) and (context.spec.inference.incremental == "Enabled" or state.incremental.chosen)


def decide(context: JobContext, state: JobState, now: float, scorers: Sequence[Worker]) -> list[Decision]:
    """Return at most one command for each idle worker of `scorers`."""
    ledger, incremental_state = state.ledger, state.incremental
    if not is_enabled(context, state) or state.trained or state.stop is not None or ledger.all_generated:
        return []
    models = _models(context)
    if any(_waits(state, index, models, now) for index in ledger.unscored()):
        return []
    loads = incremental_state.loads()
    room = {worker.name: IN_FLIGHT for worker in scorers if not ledger.scoring_on(worker.name, models)}
    for item in incremental_state.asked.values():
        if item.worker in room:
            room[item.worker] -= 1
    assigned: dict[str, list[int]] = {}
    for index in _by_work(state) if any(room.values()) else []:
        worker = _place(state, index, room, loads)
        if worker is not None:
            assigned.setdefault(worker, []).append(index)
            room[worker] -= 1
            loads[worker] += index not in incremental_state.prefixes
    return [ScorePrefix(worker, tuple(samples)) for worker, samples in assigned.items()]


def holder(state: JobState, index: int) -> str | None:
    """Return the worker that has begun this sample, if any."""
    item = state.incremental.prefixes.get(index)
    return None if item is None else item.worker


def gained_block(state: JobState, index: int, tokens: int) -> bool:
    """Return whether a sample that had `tokens` response tokens before now has another whole block."""
    prompt = state.prompt_tokens[index]
    return whole_blocks(prompt + len(state.ledger.samples[index].response)) > whole_blocks(prompt + tokens)


def scorable_tokens(state: JobState, index: int) -> int:
    """Return how many tokens of a sample, including the prompt, can be scored now, in whole blocks."""
    return whole_blocks(state.prompt_tokens[index] + len(state.ledger.samples[index].response)) * BLOCK


def _models(context: JobContext) -> frozenset[str]:
    """Return the scoring tasks that are no calls (`JobContext.calls`)."""
    return frozenset(task.name for task in context.tasks) - context.calls


def _waits(state: JobState, index: int, models: frozenset[str], now: float) -> bool:
    sample = state.ledger.samples[index]
    return now >= sample.not_before and not models.isdisjoint(sample.open_tasks)


def _by_work(state: JobState) -> list[int]:
    """Return the unfinished samples with a whole new block to score, most new tokens first.

    Samples for which a worker was asked are left out.
    """
    incremental_state, samples = state.incremental, state.ledger.samples
    work = []
    for sample in samples:
        if sample.state in UNFINISHED and len(sample.response) and sample.index not in incremental_state.asked:
            prefix = incremental_state.prefixes.get(sample.index)
            left = scorable_tokens(state, sample.index) - (0 if prefix is None else prefix.tokens)
            if left >= BLOCK:
                work.append((-left, sample.index))
    return [index for _, index in sorted(work)]


def _place(state: JobState, index: int, room: dict[str, int], loads: dict[str, int]) -> str | None:
    prefix, full = state.incremental.prefixes.get(index), state.incremental.full
    if prefix is not None:
        return prefix.worker if room.get(prefix.worker) else None
    free = [name for name, left in room.items() if left and loads[name] < full.get(name, loads[name] + 1)]
    return min(free, key=lambda name: (loads[name], name), default=None)
