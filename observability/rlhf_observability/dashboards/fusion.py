"""Fusion: the gain from moving the tail of generation to few workers, and the quality of its prediction.

Questions, in the order of the rows:
- Researcher and engineer: does fusion pay, compared with the same job with mode Disabled?
- Are predictions of time, costs and lengths right?
- Tail: when does it move, to how many workers, and what waits?
- On call: do moves fail, or take long?
"""

from typing import Final

from rlhf_common.metrics import fusion, job, samples, training
from rlhf_observability.dashboards.panels import (
    BY_JOB,
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    Annotation,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    lines,
    lines_of,
    per_job,
    stat,
)
from rlhf_observability.promql import JOB, JOBS, number_of

_OFF: Final = (
    (None, RED),
    (-0.5, ORANGE),
    (-0.25, GREEN),
    (0.25, ORANGE),
    (0.5, RED),
)  # error as a share of the prediction
_POOLED: Final = number_of(JOBS.latest(fusion.POOL, "worker"), *JOB)
_NONE: Final = f"0 * {JOBS.latest(fusion.POOL_WORKERS)}"  # for jobs outside the tail
_UNPREDICTED: Final = "in mode Fixed or Disabled, and before the coordinator has learned costs"

FORMED: Final = Annotation(
    "The pool formed",
    f"{_POOLED} unless {number_of(f'{JOBS.value(fusion.POOL)} offset 1m', *JOB)}",
    "{{rlhf_job}} moved its tail",
    "purple",
    enabled=False,
)

PAYS: Final = Row(
    "Does fusion pay?",
    (
        stat(
            title="Gain",
            empty=_UNPREDICTED,
            unit=PanelUnit.SHARE,
            thresholds=((None, RED), (0, YELLOW), (0.05, GREEN)),
            shows=fusion.GAIN.meaning,
            normal=fusion.GAIN.normal,
            cure="If it is negative for several iterations, the predictions below are wrong. Mode Auto then disables "
            "fusion by itself.",
            queries=(per_job(fusion.GAIN),),
        ),
        stat(
            title="Prediction error",
            empty=_UNPREDICTED,
            unit=PanelUnit.SHARE,
            thresholds=_OFF,
            shows=fusion.PREDICTION_ERROR.meaning,
            normal=fusion.PREDICTION_ERROR.normal,
            cure="The row on predictions shows whether costs or lengths are wrong.",
            queries=(per_job(fusion.PREDICTION_ERROR),),
        ),
        stat(
            title="Threshold",
            unit=PanelUnit.SAMPLES,
            shows=fusion.THRESHOLD.meaning,
            normal=fusion.THRESHOLD.normal,
            cure="0 in mode Auto means that no threshold was predicted to gain. `rlhf plan FILE` shows the predicted "
            "times.",
            queries=(per_job(fusion.THRESHOLD),),
        ),
        stat(
            title="Workers in the pool",
            unit=PanelUnit.NUMBER,
            shows=fusion.POOL_WORKERS.meaning,
            normal=fusion.POOL_WORKERS.normal,
            cure="If all workers are in the pool, the tail is as large as the batch, and no worker can be released.",
            queries=(per_job(fusion.POOL_WORKERS),),
        ),
        stat(
            title="Cost of control",
            unit=PanelUnit.SHARE,
            thresholds=((None, GREEN), (0.02, ORANGE), (0.05, RED)),
            shows=fusion.OVERHEAD.meaning,
            normal=fusion.OVERHEAD.normal,
            cure="Check the pauses of moved samples below. The link between workers may be slow.",
            queries=(per_job(fusion.OVERHEAD),),
        ),
        stat(
            title="Tokens scored early",
            empty="if the algorithm has no task that can score unfinished samples",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            shows=fusion.EARLY.meaning,
            normal=fusion.EARLY.normal,
            cure="0 in mode Auto means that the counterfactual predicted no gain. The panel on the iteration in "
            "progress shows it.",
            queries=(per_job(fusion.EARLY),),
        ),
    ),
)
PREDICTED: Final = Row(
    "Are predictions right?",
    (
        lines(
            title="Generation and inference: measured, predicted, without fusion",
            unit=PanelUnit.SECONDS,
            shows="Time of both stages in the last iteration: measured, predicted before it, and simulated afterwards "
            "with the actual lengths, with and without fusion.",
            normal="the measured time is near the predicted time, and the time without fusion is above both; the "
            "difference is the gain.",
            cure="If the measured time differs from the simulation in hindsight, costs are wrong. If the simulation "
            "in hindsight differs from the prediction, lengths were wrong.",
            queries=(
                per_job(fusion.LAST_MEASURED, "measured"),
                per_job(fusion.LAST_PREDICTED, "predicted"),
                per_job(fusion.LAST_SIMULATED, "hindsight"),
                per_job(fusion.LAST_SIMULATED_WITHOUT, "hindsight without"),
                per_job(fusion.LAST_WITHOUT, "predicted without"),
            ),
        ),
        lines(
            title="The iteration in progress: predicted with and without fusion",
            unit=PanelUnit.SECONDS,
            shows="Predicted time of generation and inference with and without fusion, and the predicted gain of early "
            "scoring.",
            normal=fusion.PREDICTED.normal,
            cure="If both are equal, tails are short, and fusion neither gains nor costs time.",
            queries=(
                Query(JOBS.latest(fusion.PREDICTED, "fusion"), f"{{{{fusion}}}} {BY_JOB}"),
                per_job(fusion.INCREMENTAL_GAIN, "gain of scoring early"),
            ),
        ),
        lines(
            title="Learned costs against the profile, iterations against their plan",
            empty=_UNPREDICTED,
            unit=PanelUnit.SHARE,
            shows=f"{fusion.COST.meaning} {training.PLAN_DRIFT.meaning}",
            normal=f"{fusion.COST.normal}; iterations {training.PLAN_DRIFT.normal}",
            cure="If one kind is far off, another program uses the device or the link. Predictions adapt within five "
            "iterations. For a plan that is off, see the event PlanDrift.",
            queries=(
                Query(JOBS.latest(fusion.COST, "kind"), f"{{{{kind}}}} {BY_JOB}"),
                per_job(training.PLAN_DRIFT, "iteration over its plan"),
            ),
        ),
        lines_of(
            fusion.LENGTH_DRIFT,
            "Drift of response lengths",
            "If it stays above 0.2, the policy changes faster than the coordinator learns lengths. Expect "
            "prediction errors for some iterations.",
        ),
    ),
    columns=2,
)
TAIL: Final = Row(
    "What happens in the tail?",
    (
        lines_of(
            samples.UNFINISHED,
            "Unfinished samples",
            "If a long flat end does not move to the pool, fusion is off, or its threshold is too low.",
        ),
        lines(
            title="Pool workers and released workers",
            unit=PanelUnit.NUMBER,
            shows="Generation workers that decode the tail, and generation workers that score meanwhile.",
            normal="none before the tail; then the pool, with all other workers released.",
            cure="If no worker is released, inference does not use the GPUs of generation: see spec.placement.",
            queries=(
                Query(f"{_POOLED} or {_NONE}", f"pool {BY_JOB}"),
                Query(f"{number_of(JOBS.latest(fusion.RELEASED, 'worker'), *JOB)} or {_NONE}", f"released {BY_JOB}"),
            ),
        ),
        lines(
            title="GPUs idle in the tail",
            unit=PanelUnit.NUMBER,
            shows="GPUs that are idle because other workers decode the last samples.",
            normal="a tenth of generation's GPUs with fusion; more without.",
            cure="If it is large with fusion on, use a higher threshold, or give released workers more scoring.",
            queries=(Query(JOBS.rates(job.GPU_IDLE, cause="tail"), BY_JOB),),
        ),
    ),
)
MOVES: Final = Row(
    "Do moves work?",
    (
        lines(
            title="Moved samples",
            unit=PanelUnit.SAMPLES,
            shows="Samples that moved with their KV cache or by their tokens, and samples whose move failed.",
            normal=fusion.MIGRATED.normal,
            cure="If most samples move by tokens, or many moves fail, workers cannot reach each other's ports. The "
            "event migration-failed names the reason.",
            queries=(
                Query(JOBS.increases(fusion.MIGRATED, "by"), f"by {{{{by}}}} {BY_JOB}"),
                Query(JOBS.increases(fusion.MIGRATION_FAILURES), f"stayed {BY_JOB}"),
            ),
        ),
        lines(
            title="Time of a move",
            empty="if no sample moved with its KV cache within half an hour",
            unit=PanelUnit.SECONDS,
            shows="99th percentile of the time of a move, and of the pause in which no worker decodes the sample.",
            normal="a move takes the bytes divided by the speed of the link; a pause takes a step or two.",
            cure="If pauses are long and moves are fast, steps are long. If moves are long, the link is shared or "
            "slow.",
            queries=(
                Query(JOBS.quantile(0.99, fusion.MIGRATION_SECONDS, *JOB, window="30m"), f"move {BY_JOB}"),
                Query(JOBS.quantile(0.99, fusion.MIGRATION_PAUSED, *JOB, window="30m"), f"pause {BY_JOB}"),
            ),
        ),
        lines(
            title="KV cache moved",
            unit=PanelUnit.BYTES_PER_SECOND,
            shows=fusion.MIGRATED_BYTES.meaning,
            normal=fusion.MIGRATED_BYTES.normal,
            cure="If it stays near the speed of the link, move fewer samples at a time, or use a faster network "
            "between workers.",
            queries=(Query(JOBS.rates(fusion.MIGRATED_BYTES), BY_JOB),),
        ),
    ),
)
FUSION_DASHBOARD: Final = Dashboard(
    "rlhf-fusion",
    "RLHF / Fusion",
    "Gain from moves of the tail, accuracy of predictions, and speed of moves.",
    (PAYS, PREDICTED, TAIL, MOVES),
    annotations=(FORMED,),
)
