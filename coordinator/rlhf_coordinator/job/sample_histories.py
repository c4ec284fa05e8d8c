"""The histories of the samples in the iteration in progress, for the page of a run.

Changes of place are noted after they happen, so a moment is somewhat late.
"""

import logging
import time
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_rows import sample_number
from rlhf_coordinator.reports.sample_histories import MAX_PLACES, MAX_SAMPLES, SampleHistories
from rlhf_coordinator.state.sample import SampleState

log = logging.getLogger(__name__)

DIGITS: Final = 4
"""Decimal places of moments in seconds: a tenth of a millisecond."""
LEFT_OUT: Final = (SampleState.FAILED, SampleState.DROPPED, SampleState.CUT)


def note_places(run: JobRun, now: float) -> None:
    """Note the changes of place since the last call, with the moment `now`; at most MAX_PLACES of each sample."""
    changes = run.state.ledger.take_places()
    if not changes or not _recorded(run):
        return
    for index, worker in changes:
        places = run.state.incremental.places.setdefault(index, [])
        if len(places) < MAX_PLACES and (worker or places):
            places.append((now, worker))


def record_histories(run: JobRun) -> None:
    """Give the histories of the closed iteration to the trackers; log invalid ones."""
    if not _recorded(run):
        return
    note_places(run, time.monotonic())
    try:
        histories = iteration_histories(run, time.monotonic(), time.time_ns())
    except ValidationError as error:  # a clock that jumped must not end a job
        log.warning("the sample histories of iteration %d are not recorded: %s", run.state.iteration, error)
        return
    run.trackers.histories(histories)


def iteration_histories(run: JobRun, now: float, now_ns: int) -> SampleHistories:
    """Return the history of each sample. `now`, `now_ns`: one moment by both clocks.

    Raises ValidationError for impossible numbers.
    """
    state, seen, start = run.state, run.state.incremental, run.times.start
    samples = state.ledger.samples
    workers = sorted({worker for places in seen.places.values() for _, worker in places if worker})
    numbers = {worker: number for number, worker in enumerate(workers)} | {"": -1}
    shown = next(iter(run.context.graph.reward_fields), None)

    def moment(moments: Mapping[int, float], index: int) -> float | None:
        return round(max(0.0, moments[index] - start), DIGITS) if index in moments else None

    return SampleHistories(
        iteration=state.iteration,
        began_ns=now_ns - int((now - start) * 1e9),
        workers=workers,
        prompts=list(state.prompt_tokens),
        responses=[len(sample.response) for sample in samples],
        places=[
            [(round(max(0.0, at - start), DIGITS), numbers[worker]) for at, worker in seen.places.get(sample.index, ())]
            for sample in samples
        ],
        finished=[moment(seen.finished, sample.index) for sample in samples],
        scored=[moment(seen.scored, sample.index) for sample in samples],
        versions=[
            [(each.version, each.tokens) for each in sample.response.versions][:MAX_PLACES] for sample in samples
        ],
        drafted=[sample.drafted_tokens for sample in samples],
        accepted=[sample.accepted_tokens for sample in samples],
        rewards=[None if shown is None else sample_number(sample, shown) for sample in samples],
        left_out={sample.index: sample.state.value for sample in samples if sample.state in LEFT_OUT},
    )


def _recorded(run: JobRun) -> bool:
    return run.context.spec.metrics != "Disabled" and 0 < len(run.state.ledger.samples) <= MAX_SAMPLES
