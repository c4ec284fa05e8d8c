"""The first samples of the next iteration: the facts of the job that decide them.

Rule: it reads the state and changes nothing, so a forecast of the next iteration and its beginning agree.
"""

from collections.abc import Mapping, Sequence

from rlhf_api.algorithms.iteration_prompts import PromptSchedules
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling.first_samples import FirstSamples, first_samples
from rlhf_coordinator.scheduling.length_window import WindowFacts
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.storage.prompt_lengths import lengths_after
from rlhf_coordinator.storage.prompts import window_key


def next_samples(
    run: JobRun,
    iteration: int,
    cut: Sequence[CarriedSample],
    schedules: PromptSchedules,
    expected: Mapping[int, int],
) -> FirstSamples:
    """Return the samples with which an iteration begins, and those that wait on.

    `expected`: its `expected_lengths`. The other arguments are as for `first_samples`.
    """
    spec, prompts = run.context.spec, run.prompts
    if spec.prompts.length_window < 2:
        return first_samples(cut, iteration, spec, schedules)
    facts = WindowFacts(
        lambda origin: expected.get(prompts.prompt(*origin).line), lambda batch: window_key(spec.seed, iteration, batch)
    )
    return first_samples(cut, iteration, spec, schedules, facts)


def expected_lengths(run: JobRun, iteration: int) -> Mapping[int, int]:
    """Return the expected response tokens by line when an iteration begins; empty without sorted windows.

    The iteration is the present one, or the next one while the present one is scored.
    """
    state = run.state
    if run.context.spec.prompts.length_window < 2 or state.ledger.iteration >= iteration:
        return state.expected_lengths
    return lengths_after(state.expected_lengths, state.ledger, run.prompts)
