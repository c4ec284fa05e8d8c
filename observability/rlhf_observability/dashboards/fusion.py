"""Fusion: the gain from moving the tail of generation to few workers, and the quality of its prediction.

Questions, in the order of the rows:
- Researcher and engineer: does fusion pay, compared with the same job with mode Disabled?
- Are predictions of time, costs and lengths right?
- Tail: when does it move, to how many workers, and what waits?
- On call: do moves fail, or take long?
"""

from typing import Final

from rlhf_common.metrics import fusion, job, samples
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
_UNPREDICTED: Final = "with mode Fixed or Disabled, and before anything was learned"

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
            cure="Negative for several iterations: the predictions below are wrong; mode Auto turns it off by itself.",
            queries=(per_job(fusion.GAIN),),
        ),
        stat(
            title="Error of the prediction",
            empty=_UNPREDICTED,
            unit=PanelUnit.SHARE,
            thresholds=_OFF,
            shows=fusion.PREDICTION_ERROR.meaning,
            normal=fusion.PREDICTION_ERROR.normal,
            cure="Look below whether it is costs or lengths that are off.",
            queries=(per_job(fusion.PREDICTION_ERROR),),
        ),
        stat(
            title="Threshold",
            unit=PanelUnit.SAMPLES,
            shows=fusion.THRESHOLD.meaning,
            normal=fusion.THRESHOLD.normal,
            cure="0 with mode Auto: nothing was predicted to gain; `rlhf plan FILE` shows by how much.",
            queries=(per_job(fusion.THRESHOLD),),
        ),
        stat(
            title="Workers of the pool",
            unit=PanelUnit.NUMBER,
            shows=fusion.POOL_WORKERS.meaning,
            normal=fusion.POOL_WORKERS.normal,
            cure="All workers: the tail is as wide as the batch, nothing can be released.",
            queries=(per_job(fusion.POOL_WORKERS),),
        ),
        stat(
            title="Cost of control",
            unit=PanelUnit.SHARE,
            thresholds=((None, GREEN), (0.02, ORANGE), (0.05, RED)),
            shows=fusion.OVERHEAD.meaning,
            normal=fusion.OVERHEAD.normal,
            cure="See the pauses of moved samples below: a slow link between workers.",
            queries=(per_job(fusion.OVERHEAD),),
        ),
        stat(
            title="Scored early",
            empty="where the algorithm has nothing to score early",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            shows=fusion.EARLY.meaning,
            normal=fusion.EARLY.normal,
            cure="0 with mode Auto: its counterfactual predicted no gain; see the iteration in progress.",
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
            "with the lengths that came out; with fusion and without.",
            normal="measured near predicted; without fusion above both: the space between is the gain.",
            cure="Measured far from the simulation in hindsight: costs. That far from predicted: lengths.",
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
            shows="Predicted time of generation and inference with fusion and without, and what scoring early gains.",
            normal=fusion.PREDICTED.normal,
            cure="Both alike: short tails, fusion cannot gain and costs nothing.",
            queries=(
                Query(JOBS.latest(fusion.PREDICTED, "fusion"), f"{{{{fusion}}}} {BY_JOB}"),
                per_job(fusion.INCREMENTAL_GAIN, "gain of scoring early"),
            ),
        ),
        lines(
            title="Costs learned, against the profile",
            empty=_UNPREDICTED,
            unit=PanelUnit.SHARE,
            shows=fusion.COST.meaning,
            normal=fusion.COST.normal,
            cure="One kind far off: something else uses the device or link. Predictions follow in five iterations.",
            queries=(Query(JOBS.latest(fusion.COST, "kind"), f"{{{{kind}}}} {BY_JOB}"),),
        ),
        lines_of(
            fusion.LENGTH_DRIFT,
            "Drift of lengths",
            "Above 0.2 for long: the policy changes faster than lengths are learned; expect errors, they settle.",
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
            "A long flat end that never moves: fusion is off or its threshold too low.",
        ),
        lines(
            title="Workers in the pool, and released",
            unit=PanelUnit.NUMBER,
            shows="Generation workers that keep the tail, and those that score meanwhile.",
            normal="none until the tail; then the pool, and all others released.",
            cure="A pool without any released: inference does not use generation's GPUs; see placement.",
            queries=(
                Query(f"{_POOLED} or {_NONE}", f"pool {BY_JOB}"),
                Query(f"{number_of(JOBS.latest(fusion.RELEASED, 'worker'), *JOB)} or {_NONE}", f"released {BY_JOB}"),
            ),
        ),
        lines(
            title="GPUs idle in the tail",
            unit=PanelUnit.NUMBER,
            shows="GPUs that compute nothing because the last samples decode elsewhere.",
            normal="what fusion makes small: a tenth of generation's GPUs.",
            cure="Large with fusion on: a higher threshold, or more scoring to fill them with.",
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
            shows="Samples that moved with their KV cache or by their tokens, and those that were to move and stayed.",
            normal=fusion.MIGRATED.normal,
            cure="Mostly by tokens, or many that stay: workers do not reach each other's ports; the event "
            "migration-failed says why.",
            queries=(
                Query(JOBS.increases(fusion.MIGRATED, "by"), f"by {{{{by}}}} {BY_JOB}"),
                Query(JOBS.increases(fusion.MIGRATION_FAILURES), f"stayed {BY_JOB}"),
            ),
        ),
        lines(
            title="Time of a move",
            empty="when nothing moved with its KV cache within half an hour",
            unit=PanelUnit.SECONDS,
            shows="99th percentile of the time of a move, and of the pause in which nobody decodes the sample.",
            normal="a move: bytes over the speed of the link. A pause: a step or two.",
            cure="Long pauses with fast moves: steps are long; long moves: the link is shared or slow.",
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
            cure="Near the speed of the link for long: fewer samples at a time, or a faster network for workers.",
            queries=(Query(JOBS.rates(fusion.MIGRATED_BYTES), BY_JOB),),
        ),
    ),
)
FUSION_DASHBOARD: Final = Dashboard(
    "rlhf-fusion",
    "RLHF / Fusion",
    "What moving the tail of generation gains, whether it was predicted, and how moves go.",
    (PAYS, PREDICTED, TAIL, MOVES),
    annotations=(FORMED,),
)
