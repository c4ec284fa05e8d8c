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
            shows="Mean time of an optimizer step in the chosen time.",
            normal=training.STEP_SECONDS.normal,
            cure="If it is longer with the same lengths, check bubbles, and look for a slow rank.",
            queries=(Query(JOBS.mean(training.STEP_SECONDS, *JOB, window="$__range"), BY_JOB),),
        ),
        stat(
            title="Bubbles",
            unit=PanelUnit.SHARE,
            low=0,
            high=1,
            thresholds=((None, GREEN), (0.3, ORANGE), (0.5, RED)),
            shows="Measured share of a step in which a rank waits for others.",
            normal=training.BUBBLE.normal,
            cure="Use more micro-batches, fewer stages, or fusion.intraStage, which fills bubbles with work of the "
            "other model.",
            queries=(Query(JOBS.latest(training.BUBBLE, source="measured"), BY_JOB),),
        ),
        stat(
            title="Skipped steps",
            unit=PanelUnit.NUMBER,
            thresholds=((None, GREEN), (1, ORANGE), (10, RED)),
            shows="Optimizer steps in the chosen time with an infinite or NaN loss or gradient, and steps of the last "
            "finished iteration in which every sample abstained.",
            normal=training.NONFINITE_STEPS.normal,
            cure="If values are not finite, use a smaller learning rate, gradient clipping or bfloat16; the job fails "
            "if it continues. If samples have no reward, check the endpoint of the reward.",
            queries=(
                Query(JOBS.increases(training.NONFINITE_STEPS, window="$__range"), f"not finite {BY_JOB}"),
                per_job(training.SKIPPED_STEPS, "no reward"),
            ),
        ),
        stat(
            title="Training groups formed",
            unit=PanelUnit.NUMBER,
            shows=training.GROUP_EPOCH.meaning,
            normal=training.GROUP_EPOCH.normal,
            cure="If there are many, ranks are lost repeatedly. `rlhf describe NAME` shows their last log lines.",
            queries=(per_job(training.GROUP_EPOCH),),
        ),
    ),
)
SCHEDULE: Final = Row(
    "Is the schedule as fast as predicted?",
    (
        lines(
            title="Time of a step, against its prediction",
            unit=PanelUnit.SECONDS,
            shows="Median and 95th percentile of the time of optimizer steps, the predicted time, and the time for "
            "which critics, or all models, trained during the decoding of the next iteration.",
            normal=training.PREDICTED_STEP.normal,
            cure="If measured and predicted times differ much, lengths have changed since the measurement. Mode Auto "
            "measures again at the next start.",
            queries=(
                Query(JOBS.quantile(0.5, training.STEP_SECONDS, *JOB), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.95, training.STEP_SECONDS, *JOB), f"95% {BY_JOB}"),
                per_job(training.PREDICTED_STEP, "predicted"),
                per_job(training.CRITIC_OVERLAP, "critics beside decoding"),
                per_job(training.ROLLOUT_OVERLAP, "all models beside decoding"),
                per_job(training.STREAM_HIDDEN, "gradients before the last token"),
            ),
        ),
        lines(
            title="Bubbles against their prediction, and padding",
            unit=PanelUnit.SHARE,
            high=1,
            shows=f"{training.BUBBLE.meaning} {training.PADDING.meaning} {training.SHARED_PROMPTS.meaning} "
            f"{training.CRITIC_OVERLAP_ON.meaning}",
            normal=f"{training.BUBBLE.normal}; padding under 0.3.",
            cure="If the measured bubbles are far above the predicted ones, one rank is slow: find its GPU on the "
            "Workers dashboard. For padding, set spec.training.packing.",
            queries=(
                Query(JOBS.latest(training.BUBBLE, "source"), f"{{{{source}}}} {BY_JOB}"),
                per_job(training.PADDING, "padding"),
                per_job(training.CRITIC_OVERLAP_ON, "critics beside decoding"),
                per_job(training.SHARED_PROMPTS, "computed tokens"),
            ),
        ),
        stacked(
            title="Jobs by schedule",
            unit=PanelUnit.NUMBER,
            shows="Number of the chosen jobs, by the method of their schedule.",
            normal=training.SCHEDULE.normal,
            cure="A job that is serial in mode Auto measured no other method to be faster.",
            queries=(Query(total(JOBS.latest(training.SCHEDULE, "method"), "method"), "{{method}}"),),
        ),
        heatmap(
            title="Steps by duration",
            unit=PanelUnit.SECONDS,
            width=HALF,
            shows="Distribution of the time of steps.",
            normal="one band, which moves slowly with the lengths of responses.",
            cure="A second band above it is a slow rank, or steps that wait for checkpoints.",
            queries=(Query(JOBS.buckets(training.STEP_SECONDS)),),
        ),
        lines(
            title="Busy training GPUs",
            unit=PanelUnit.NUMBER,
            width=HALF,
            shows="GPUs of the training group that computed, and all GPUs of the group.",
            normal="both are equal while the job trains; otherwise 0 compute, unless the group is colocated.",
            cure="If training GPUs are busy for a small share of the time, use fewer of them, or colocate training "
            "with generation.",
            queries=(
                Query(JOBS.rates(job.GPU_BUSY, group="training"), f"compute {BY_JOB}"),
                per_job(job.GPUS, "held", group="training"),
            ),
        ),
    ),
)
GRADIENTS: Final = Row(
    "Do gradients explode, do tokens use all experts, and are gradients biased?",
    (
        lines_of(
            run.GRADIENT_NORM,
            "Gradient norm",
            "For a spike of ten times, check the reward and the lengths of that iteration. Clip gradients or "
            "lower the learning rate.",
        ),
        lines_of(
            run.LEARNING_RATE,
            "Learning rate",
            "`rlhf get NAME -o yaml` shows the current settings.",
            low=None,
        ),
        lines(
            title="Use of experts",
            unit=PanelUnit.NUMBER,
            shows=f"{run.EXPERT_LOAD.meaning} {run.EXPERTS_UNUSED.meaning}",
            normal=f"load: {run.EXPERT_LOAD.normal}; unused: {run.EXPERTS_UNUSED.normal}.",
            empty="for jobs whose models have no experts",
            cure="If either rises, evaluate the policy and the initial model and compare them. Then use a smaller "
            "learning rate or fewer iterations.",
            queries=(per_model(run.EXPERT_LOAD, "load"), per_model(run.EXPERTS_UNUSED, "unused")),
        ),
        lines(
            title="Mismatch of trainer and engine",
            unit=PanelUnit.NATS,
            shows="Mean difference of log-probabilities at the same weights, and KL divergence of the engine from the "
            "trainer, in nats per token.",
            normal="the difference is below 1e-4 in float32 and below 0.01 in bfloat16; the divergence is below 1e-3.",
            cure="A sudden rise means an old weight version, another precision, or another attention kernel in the "
            "engine.",
            queries=(per_model(run.MISMATCH, "difference"), per_model(run.MISMATCH_KL, "divergence")),
        ),
        lines_of(
            run.MISMATCH_MAX,
            "Largest mismatch of a token",
            "If it rises without the mean, rare tokens differ, which is harmless with clipping. If it rises with "
            "the mean, see Mismatch of trainer and engine.",
        ),
        lines_of(
            run.MISMATCH_CORRECTED,
            "Tokens outside the limits of the correction",
            "If most tokens are outside, the engine samples from another policy, or the limits do not fit the "
            "precision.",
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
            shows="Cross entropy between policy and draft model in nats per token, and the part of it that is their "
            "divergence.",
            normal=training.DRAFT_DIVERGENCE.normal,
            cure="If the divergence rises or does not fall, raise draftModel.learningRate or use a larger draft model.",
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
    "Step times, bubbles and schedules, gradients, and the mismatch of trainer and engine.",
    (HEALTHY, SCHEDULE, GRADIENTS, DRAFT_MODEL),
    since="now-6h",
)
