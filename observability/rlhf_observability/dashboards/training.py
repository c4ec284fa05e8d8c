"""Training: time of steps, bubbles of the pipeline, gradients, and the agreement of trainer and engine.

Questions, in the order of the rows:
- Is training healthy: how long is a step, how much of it is bubbles, were steps skipped?
- Engineer: does the schedule match its prediction?
- Researcher: do gradients explode, do routers use their experts, and is the gradient biased because two engines compute
  differently?
- Researcher: does a trained draft model keep up with the policy?
"""

from typing import Final

from rlhf_common.metrics import job, run, training
from rlhf_observability.dashboards.panels import (
    BY_JOB,
    GREEN,
    HALF,
    ORANGE,
    RED,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    heatmap,
    lines,
    lines_of,
    per_job,
    per_model,
    stacked,
    stat,
)
from rlhf_observability.promql import JOB, JOBS, total

HEALTHY: Final = Row(
    "Is training healthy?",
    (
        stat(
            title="Time of a step",
            unit=PanelUnit.SECONDS,
            shows="Mean time of an optimizer step in the time shown.",
            normal=training.STEP_SECONDS.normal,
            cure="Longer with the same lengths: see bubbles, and a rank that is slower than the others.",
            queries=(Query(JOBS.mean(training.STEP_SECONDS, *JOB, window="$__range"), BY_JOB),),
        ),
        stat(
            title="Bubbles",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            thresholds=((None, GREEN), (0.3, ORANGE), (0.5, RED)),
            shows="Share of a step in which a rank waits for others, as measured.",
            normal=training.BUBBLE.normal,
            cure="More micro-batches, fewer stages, or fusion.intraStage, which fills them with the other model.",
            queries=(Query(JOBS.latest(training.BUBBLE, source="measured"), BY_JOB),),
        ),
        stat(
            title="Steps skipped",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE), (10, RED)),
            shows="Optimizer steps in the time shown whose loss or gradient was infinite or NaN, and those of the last "
            "finished iteration in which every sample abstained.",
            normal=training.NONFINITE_STEPS.normal,
            cure="Not finite: a smaller learning rate, gradient clipping, or bfloat16; the job fails when it goes on. "
            "Without a reward: see the reward's endpoint.",
            queries=(
                Query(JOBS.increases(training.NONFINITE_STEPS, window="$__range"), f"not finite {BY_JOB}"),
                per_job(training.SKIPPED_STEPS, "no reward"),
            ),
        ),
        stat(
            title="Groups of ranks formed",
            unit=PanelUnit.NUMBER,
            shows=training.GROUP_EPOCH.meaning,
            normal=training.GROUP_EPOCH.normal,
            cure="Many: a rank is lost again and again; `rlhf describe NAME` has its last words.",
            queries=(per_job(training.GROUP_EPOCH),),
        ),
    ),
)
SCHEDULE: Final = Row(
    "Does the schedule keep what it promised?",
    (
        lines(
            title="Time of a step, against its prediction",
            unit=PanelUnit.SECONDS,
            shows="Median and 95th percentile of optimizer steps, the time that the schedule was chosen for, and how "
            "long critics, or all models, trained beside decoding.",
            normal=training.PREDICTED_STEP.normal,
            cure="Far from it: lengths changed since it was measured; mode Auto measures again at the next start.",
            queries=(
                Query(JOBS.quantile(0.5, training.STEP_SECONDS, *JOB), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.95, training.STEP_SECONDS, *JOB), f"95% {BY_JOB}"),
                per_job(training.PREDICTED_STEP, "predicted"),
                per_job(training.CRITIC_OVERLAP, "critics beside decoding"),
                per_job(training.ROLLOUT_OVERLAP, "all models beside decoding"),
            ),
        ),
        lines(
            title="Bubbles against their prediction, and padding",
            unit=PanelUnit.SHARE,
            high=1,
            shows=f"{training.BUBBLE.meaning} {training.PADDING.meaning} {training.CRITIC_OVERLAP_ON.meaning}",
            normal=f"{training.BUBBLE.normal}; padding under 0.3.",
            cure="Measured far above predicted: one rank is slow; look for its GPU on the dashboard of workers. "
            "Padding: set spec.training.packing.",
            queries=(
                Query(JOBS.latest(training.BUBBLE, "source"), f"{{{{source}}}} {BY_JOB}"),
                per_job(training.PADDING, "padding"),
                per_job(training.CRITIC_OVERLAP_ON, "critics beside decoding"),
            ),
        ),
        stacked(
            title="Jobs by schedule",
            unit=PanelUnit.NUMBER,
            shows="Jobs of those chosen, by the method of their schedule.",
            normal=training.SCHEDULE.normal,
            cure="A job that is serial with mode Auto measured no other to be faster.",
            queries=(Query(total(JOBS.latest(training.SCHEDULE, "method"), "method"), "{{method}}"),),
        ),
        heatmap(
            title="Steps by their time",
            unit=PanelUnit.SECONDS,
            width=HALF,
            shows="How many steps took how long.",
            normal="one band, which moves slowly with the lengths of responses.",
            cure="A second band above it is a straggler, or checkpoints that steps wait for.",
            queries=(Query(JOBS.buckets(training.STEP_SECONDS)),),
        ),
        lines(
            title="GPUs of training that compute",
            unit=PanelUnit.NUMBER,
            width=HALF,
            shows="GPUs of the training group that computed, and those that it holds.",
            normal="equal while the job trains, none meanwhile unless the group is colocated.",
            cure="A small share of the time: fewer training GPUs, or colocation with generation.",
            queries=(
                Query(JOBS.rates(job.GPU_BUSY, group="training"), f"compute {BY_JOB}"),
                per_job(job.GPUS, "held", group="training"),
            ),
        ),
    ),
)
GRADIENTS: Final = Row(
    "Do gradients explode, are experts used, and is there a bias?",
    (
        lines_of(
            run.GRADIENT_NORM,
            "Norm of the gradient",
            "A spike of ten times: look at the reward and the lengths of that iteration; clip, or lower the rate.",
        ),
        lines_of(
            run.LEARNING_RATE,
            "Learning rate",
            "Not as meant: `rlhf get NAME -o yaml` shows what is in force.",
            low=None,
        ),
        lines(
            title="Use of experts",
            unit=PanelUnit.NUMBER,
            shows=f"{run.EXPERT_LOAD.meaning} {run.EXPERTS_UNUSED.meaning}",
            normal=f"load: {run.EXPERT_LOAD.normal}; unused: {run.EXPERTS_UNUSED.normal}.",
            empty="of jobs whose models have no experts",
            cure="Either rises: compare with the model that training began with, by an evaluation of both; then a "
            "smaller learning rate, or fewer iterations.",
            queries=(per_model(run.EXPERT_LOAD, "load"), per_model(run.EXPERTS_UNUSED, "unused")),
        ),
        lines(
            title="Mismatch of trainer and engine",
            unit=PanelUnit.NATS,
            shows="How much log-probabilities differ at the same weights, and their divergence; nats a token.",
            normal="below 1e-4 in float32, 0.01 in bfloat16; the divergence below 1e-3.",
            cure="A sudden rise is a stale weight version, or another precision or attention in the engine.",
            queries=(per_model(run.MISMATCH, "difference"), per_model(run.MISMATCH_KL, "divergence")),
        ),
        lines_of(
            run.MISMATCH_MAX,
            "Largest mismatch of a token",
            "Alone without the mean: rare tokens, harmless when clipped. With it: see beside.",
        ),
        lines_of(
            run.MISMATCH_CORRECTED,
            "Tokens outside the limits of the correction",
            "Most are: the engine samples another policy, see beside, or the limits do not fit the precision.",
        ),
    ),
    columns=3,
)
DRAFT_MODEL: Final = Row(
    "Does the draft model keep up with the policy?",
    (
        lines(
            title="Draft model against the policy",
            unit=PanelUnit.NUMBER,
            shows="Cross entropy of the draft model to the policy in nats a token, and what of it is their difference.",
            normal=training.DRAFT_DIVERGENCE.normal,
            cure="The difference rises or does not fall: raise draftModel.learningRate, or take a larger draft model.",
            queries=(
                per_job(training.DRAFT_LOSS, "cross entropy"),
                per_job(training.DRAFT_DIVERGENCE, "difference"),
            ),
        ),
    ),
)
TRAINING_DASHBOARD: Final = Dashboard(
    "rlhf-training",
    "RLHF / Training",
    "Time of steps, bubbles and schedules, gradients, and whether trainer and engine agree.",
    (HEALTHY, SCHEDULE, GRADIENTS, DRAFT_MODEL),
    since="now-6h",
)
