"""The profile of the iteration that ends: measurements of its samples, steps, tasks and phases, for findings.

With spec.metrics Disabled nothing is recorded.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from rlhf_coordinator.job.bottlenecks import log_bottlenecks
from rlhf_coordinator.job.job_run import JobRun
from rlhf_planner.explain.iteration_profile import (
    MAX_SAMPLES,
    MAX_STEPS,
    DraftFacts,
    IterationProfile,
    JobSettings,
    SampleFacts,
    StepFacts,
    TaskFacts,
)

log = logging.getLogger(__name__)

DIGITS: Final = 4
"""Decimal places of moments in seconds: a tenth of a millisecond."""
STARTING: Final = "Starting"
"""The phase that a profile leaves out."""
TRAINING: Final = ("bubble_share", "bubble_seconds", "step_seconds", "predicted_step_seconds")
"""Training metrics in a profile, without their prefix."""


def record_facts(run: JobRun, metrics: Mapping[str, float]) -> None:
    """Give the profile of the closed iteration to the trackers and the bottleneck log; log one that is invalid.

    `metrics`: metrics of the iteration.
    """
    if run.context.spec.metrics == "Disabled":
        return
    try:
        facts = iteration_profile(run, metrics)
    except ValidationError as error:  # a clock that jumped must not end a job
        log.warning("the time profile of iteration %d is not recorded: %s", run.state.iteration, error)
        return
    run.trackers.facts(facts)
    log_bottlenecks(run.bottlenecks, run.background, facts, time.monotonic())


def iteration_profile(run: JobRun, metrics: Mapping[str, float]) -> IterationProfile:
    """Return the profile of the iteration. Raises ValidationError for impossible numbers."""
    phases = {name: seconds for name, seconds in run.times.seconds.items() if name != STARTING}
    state = run.state
    return IterationProfile(
        iteration=state.iteration,
        total=max(0.0, metrics["seconds/iteration"] - run.times.seconds.get(STARTING, 0.0)),
        phases=phases,
        settings=job_settings(run),
        samples=_samples(run),
        steps=_steps(run),
        tasks=_tasks(run),
        drafts=_drafts(run),
        training={
            name: value for name in TRAINING if math.isfinite(value := metrics.get(f"training/{name}", math.nan))
        },
        evaluation_waited=metrics.get("evaluation/waited_seconds"),
        returned=float(state.ledger.returned),
    )


def job_settings(run: JobRun) -> JobSettings:
    """Return the fields that a finding may name."""
    spec, fusion = run.context.spec, run.state.fusion
    sizes = {str(group): size for group, size in run.state.fleet.sizes.items()}
    return JobSettings(
        generation_workers=sizes.get("generation", 0),
        inference_workers=sizes.get("inference", 0),
        max_batch_size=spec.generation.max_batch_size,
        max_response_tokens=spec.rollout.max_response_tokens,
        inter_stage=spec.fusion.inter_stage.mode,
        balance=spec.fusion.inter_stage.balance,
        overlap=spec.inference.overlap,
        speculation=spec.generation.speculation.mode,
        intra_stage=spec.fusion.intra_stage.mode,
        weight_sharing=spec.training.weight_sharing,
        pipeline=spec.training.parallelism.pipeline,
        checkpoint_every=spec.checkpoints.every if spec.checkpoints is not None else 0,
        evaluation_every=spec.evaluation.every if spec.evaluation is not None else 0,
        tokens_replayed=fusion.costs.replays,
    )


def _samples(run: JobRun) -> SampleFacts | None:
    state, seen = run.state, run.state.incremental
    samples = state.ledger.samples
    if not samples or len(samples) > MAX_SAMPLES or any(sample.left_out for sample in samples):
        return None
    indices = range(len(samples))
    if any(index not in seen.begun or index not in seen.finished or not samples[index].decoded_by for index in indices):
        return None
    first = min(seen.begun.values())
    whole = all(index in seen.scored for index in indices)

    def moment(moments: Mapping[int, float], index: int) -> float:
        return round(moments[index] - first, DIGITS)

    return SampleFacts(
        prompts=[float(tokens) for tokens in state.prompt_tokens],
        responses=[float(len(sample.response)) for sample in samples],
        begun=[moment(seen.begun, index) for index in indices],
        finished=[moment(seen.finished, index) for index in indices],
        scored=[moment(seen.scored, index) for index in indices] if whole else [],
        workers=[int(sample.decoded_by[-1].rpartition("-")[2]) for sample in samples],
    )


def _steps(run: JobRun) -> list[StepFacts]:
    """Return decode steps grouped by worker, batch size in powers of two, and whether drafts were verified.

    At most MAX_STEPS groups are returned.
    """
    sums: dict[tuple[str, int, bool], list[float]] = {}
    for interval, stretch in run.state.fusion.stretches:
        if stretch.steps <= 0 or stretch.rows <= 0:
            continue
        key = interval.worker, round(math.log2(max(1.0, stretch.rows))), stretch.verified > 0
        total = sums.setdefault(key, [0.0] * 6)
        each = (1.0, stretch.rows, stretch.context * stretch.rows, max(1.0, stretch.tokens) * stretch.rows)
        for at, value in enumerate(each):
            total[at] += stretch.steps * value
        total[4] += stretch.verified
        total[5] += stretch.seconds
    return [
        StepFacts(
            worker=worker,
            steps=steps,
            rows=rows / steps,
            keys=keys / rows,
            tokens=tokens / rows,
            verified=verified,
            seconds=seconds,
        )
        for (worker, _, _), (steps, rows, keys, tokens, verified, seconds) in sorted(sums.items())[:MAX_STEPS]
    ]


def _tasks(run: JobRun) -> list[TaskFacts]:
    seen, calls = run.state.incremental, run.context.calls
    tasks = []
    for task in run.context.tasks:
        passes = seen.passes.get(task.name)
        line = None if passes is None else passes.fitted()
        tasks.append(
            TaskFacts(
                name=task.name,
                call=task.name in calls,
                busy=passes.seconds if passes is not None else 0.0,
                last=float(seen.last_tasks[task.name]),
                setup=line.setup if line is not None else 0.0,
                per_token=line.per_token if line is not None else 0.0,
            )
        )
    return tasks


def _drafts(run: JobRun) -> DraftFacts | None:
    totals = run.state.speculation.iteration
    if not totals.steps:
        return None
    return DraftFacts(
        steps=totals.steps,
        drafted_steps=totals.drafted_steps,
        samples=totals.samples,
        tokens=totals.tokens,
        drafted=totals.drafted.total(),
        accepted=totals.accepted.total(),
        draft_seconds=totals.draft_seconds,
        seconds=totals.seconds,
    )
