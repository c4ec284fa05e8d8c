"""Balancing: before the tail consolidates, samples move from workers that would end last to those that end first.

Rule: pure; a worker in `FusionState.moved_at` rests for COOLDOWN_SECONDS.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from rlhf_api.algorithms import samples_per_prompt
from rlhf_coordinator.scheduling import sibling_sharing
from rlhf_coordinator.scheduling.sibling_sharing import MAX_WORKER_TOKENS, SHARE_SECONDS
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import Worker
from rlhf_planner.inter_stage.balance import Reallocation, balance, lacks_nothing
from rlhf_planner.inter_stage.tail_placement import TailSample
from rlhf_planner.inter_stage.throughput import EVEN_PACE

SPREAD: Final = 1.5
"""Ratio of the most to the least loaded worker, in samples times pace, from which samples are balanced."""
COOLDOWN_SECONDS: Final = 2.0
"""Seconds for which a worker is left out after its entry in `FusionState.moved_at`."""


def reallocations(
    context: JobContext, state: JobState, now: float, ready: Sequence[Worker]
) -> tuple[Reallocation, ...]:
    """Return moves of samples between the workers that are `ready` to decode; empty where balancing is disabled or not
    due.
    """
    ledger, fusion, settings = state.ledger, state.fusion, context.spec.fusion.inter_stage
    if settings.balance == "Disabled" or not fusion.measured or now < fusion.next_balance:
        return ()
    if ledger.count(SampleState.QUEUED, SampleState.MIGRATING) or ledger.all_generated:
        return ()
    staying = {worker.name: staying_samples(state, worker.name) for worker in ready}
    work = [len(samples) * fusion.paces.get(name, EVEN_PACE).level for name, samples in staying.items()]
    if len(work) < 2 or max(map(len, staying.values())) < 2 or max(work) < SPREAD * min(work):
        return ()
    cooling = {name for name, moment in fusion.moved_at.items() if now - moment < COOLDOWN_SECONDS}
    samples = {name: [unfinished_sample(state, index) for index in indices] for name, indices in staying.items()}
    lacking = partial(_lacking, state, samples_per_prompt(context.spec))
    shared = lacking if sibling_sharing.is_enabled(context) else lacks_nothing
    return balance(
        samples, fusion.costs, fusion.lengths, settings.transfer, cooling, paces=fusion.paces, lacking=shared
    )  # fmt: skip


def _lacking(state: JobState, per_prompt: int, worker: str, sample: TailSample) -> float:
    """Return the estimated seconds until a destination has the sibling tokens of a sample's prompt."""
    group = sample.sample // per_prompt
    has = state.siblings.has.get(group, {}).get(worker, {})
    unsent = max(0, sibling_sharing.unsent_tokens(state, group, has, per_prompt) - sample.tokens)
    return SHARE_SECONDS * -(-unsent // MAX_WORKER_TOKENS)


def unfinished_sample(state: JobState, index: int) -> TailSample:
    """Return a sample in the planner's form."""
    tokens = len(state.ledger.samples[index].response)
    return TailSample(index, state.prompt_tokens[index], tokens, state.prompt_lines[index])


def staying_samples(state: JobState, name: str) -> list[int]:
    """Return the samples that a worker decodes and that were not asked to move, by index."""
    samples = state.ledger.samples
    return [index for index in state.ledger.held_by(name) if samples[index].state is SampleState.DECODING]
