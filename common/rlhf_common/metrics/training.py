"""Metrics of training from the coordinator, such as steps, bubbles, the group of ranks and the draft model.

Rule: a step is one optimizer step.
"""

from functools import partial
from typing import Final

from rlhf_common.metrics import buckets, labels
from rlhf_common.metrics.metric import Metric, MetricKind, Server, Unit, coordinator_counter, coordinator_gauge

STEP_SECONDS: Final = Metric(
    "rlhf_training_step_seconds",
    MetricKind.HISTOGRAM,
    Unit.SECONDS,
    (Server.COORDINATOR,),
    "Time of one optimizer step.",
    "measured by rank 0 in every training; exemplars name worker and iteration",
    "steady, near rlhf_training_predicted_step_seconds; it follows the lengths of responses",
    buckets=buckets.STEP_SECONDS,
)
PREDICTED_STEP: Final = coordinator_gauge(
    "rlhf_training_predicted_step_seconds",
    unit=Unit.SECONDS,
    meaning="Predicted time of an optimizer step under the current schedule.",
    source="measured times of stages and transfers, simulated under the schedule",
    normal="within 25% of the median of rlhf_training_step_seconds",
    absent="the schedule was not chosen by measurement",
)
BUBBLE: Final = coordinator_gauge(
    "rlhf_training_bubble_ratio",
    unit=Unit.RATIO,
    meaning="Share of a training step in which a rank waits for others: as predicted by the schedule, and as measured.",
    source="measured: mean over ranks of time without computation / time of steps, of the last finished iteration",
    normal="(stages - 1) / (micro-batches + stages - 1) for a serial schedule; less for a fused one",
    labels=(labels.FORECAST,),
    absent="no measurement or no prediction exists",
)
SCHEDULE: Final = coordinator_gauge(
    "rlhf_training_schedule",
    unit=Unit.STATE,
    meaning="1 for the method of the current schedule; the other methods have no series.",
    source="the choice of the coordinator",
    normal="changes at most once, in the first iteration",
    labels=(labels.METHOD,),
    one_a_set=True,
)
SKIPPED_STEPS: Final = coordinator_gauge(
    "rlhf_training_skipped_steps",
    unit=Unit.NUMBER,
    meaning="Optimizer steps of the last finished iteration that were skipped because every sample of their "
    "mini-batch abstained.",
    source="the training ranks",
    normal="0",
    absent="no iteration is finished",
    run_metric="training/train/skipped_steps",
)
CRITIC_OVERLAP: Final = coordinator_gauge(
    "rlhf_training_critic_overlap_seconds",
    unit=Unit.SECONDS,
    meaning="Training time of the critics in the last reported iteration that overlapped the decoding of the "
    "next iteration.",
    source="the training ranks: from the order to train critics until the end of that training",
    normal="the critics' share of training; less than the time of generation, or scoring must wait",
    absent="spec.training.criticOverlap is Disabled, or the last iteration trained all models at once",
    run_metric="training/critic_overlap_seconds",
)
CRITIC_OVERLAP_ON: Final = coordinator_gauge(
    "rlhf_training_critic_overlap_on",
    unit=Unit.NUMBER,
    meaning="1 if the last iteration trained its critics during the decoding of the next iteration, otherwise 0.",
    source="the coordinator, where spec.training.criticOverlap is Auto",
    normal="1 if that is faster, otherwise 0; at times an iteration measures the other choice",
    absent="spec.training.criticOverlap is Disabled or Enabled",
    run_metric="critic_overlap/on",
)
PLAN_DRIFT: Final = coordinator_gauge(
    "rlhf_plan_drift_ratio",
    unit=Unit.RATIO,
    meaning="Measured divided by predicted seconds of the last iteration (generation, scoring, training, publishing). "
    "The prediction is that of the plan for spec.devices; after a decision about the plan, the seconds measured then.",
    source="the coordinator, from the phases of an iteration",
    normal="0.8 to 1.2; beyond that for three iterations, the coordinator searches for another plan",
    absent="the job has no plan for spec.devices, spec.devices.replan is Disabled, or the last iteration "
    "is the first one of this process or had a long recovery",
    run_metric="plan/drift",
)
STREAM_HIDDEN: Final = coordinator_gauge(
    "rlhf_training_stream_hidden_seconds",
    unit=Unit.SECONDS,
    meaning="Time that the first training rank spent on gradients before the last token of the last finished "
    "iteration was decoded.",
    source="the training ranks: commands for gradients that ended before the last token; a coordinator that restarts "
    "counts from its start",
    normal="up to the whole time of training; 0 if all prompts end together",
    absent="spec.training.stream is Disabled, or no iteration is finished",
    run_metric="training/stream_hidden_seconds",
)
STREAM_MICROBATCHES: Final = coordinator_gauge(
    "rlhf_training_stream_microbatches",
    unit=Unit.NUMBER,
    meaning="Micro-batches of the first training rank whose gradients were computed in that time.",
    source="the training ranks, as for rlhf_training_stream_hidden_seconds",
    normal="close to the micro-batches of the iteration on one rank if few long responses remain",
    absent="spec.training.stream is Disabled, or no iteration is finished",
    run_metric="training/stream_microbatches",
)
ROLLOUT_OVERLAP: Final = coordinator_gauge(
    "rlhf_rollout_overlap_seconds",
    unit=Unit.SECONDS,
    meaning="Training time of the last reported iteration that overlapped the decoding and scoring of the next "
    "iteration.",
    source="the training time of the ranks minus the time for which the coordinator then waited for them",
    normal="the whole training, if it is shorter than generation and scoring",
    absent="spec.rollout.overlapTraining is Disabled, or a checkpoint or an evaluation followed the last iteration",
    run_metric="rollout/overlap_seconds",
)
PADDING: Final = coordinator_gauge(
    "rlhf_training_padding_ratio",
    unit=Unit.RATIO,
    meaning="Share of padding in the tokens that the ranks computed in the last finished iteration.",
    source="the training ranks: 1 - tokens of samples / tokens of micro-batches, each as wide as its longest sample",
    normal="0 with spec.training.packing, otherwise below 0.3; above that, set spec.training.packing or lower "
    "microBatchTokens or microBatchSize",
    absent="no iteration is finished, or it took no step",
    run_metric="training/train/padding",
)
SHARED_PROMPTS: Final = coordinator_gauge(
    "rlhf_training_shared_prompt_ratio",
    unit=Unit.RATIO,
    meaning="Tokens that the ranks computed in the last finished iteration, as a share of the tokens of its samples.",
    source="the training ranks: a prompt counts once for all responses of a micro-batch that share it",
    normal="below 1 if a mini-batch has several responses to a prompt; 1 if sharedPrompts: Auto predicts no gain",
    absent="spec.training.sharedPrompts is Disabled, no iteration is finished, or it took no step",
    run_metric="training/train/shared_prompt_ratio",
)
MICRO_BATCHES: Final = coordinator_gauge(
    "rlhf_training_micro_batches",
    unit=Unit.NUMBER,
    meaning="Micro-batches per mini-batch, summed over data parallel copies, as a mean of the last finished iteration.",
    source="the training ranks",
    normal="miniBatchSize / microBatchSize; more if spec.training.microBatchTokens requires it",
    absent="no iteration is finished, or it took no step",
    run_metric="training/train/micro_batches",
)
LARGEST_MICRO_BATCH: Final = coordinator_gauge(
    "rlhf_training_largest_micro_batch_tokens",
    unit=Unit.NUMBER,
    meaning="Tokens of the largest micro-batch of the last finished iteration, including padding.",
    source="the training ranks",
    normal="at most spec.training.microBatchTokens, unless one sample is longer",
    absent="no iteration is finished, or it took no step",
    run_metric="training/train/largest_micro_batch_tokens",
)
HOST_OPTIMIZER: Final = coordinator_gauge(
    "rlhf_training_host_optimizer_bytes",
    unit=Unit.BYTES,
    meaning="Size of AdamW's moments in host memory, for the training rank with the largest size.",
    source="the training ranks",
    normal="constant, as `rlhf plan` predicts",
    absent="spec.training.parallelism.offloadOptimizer is false, or no iteration is finished",
    run_metric="training/train/host_optimizer_bytes",
)
NONFINITE_STEPS: Final = coordinator_counter(
    "rlhf_nonfinite_steps_total",
    unit=Unit.NUMBER,
    meaning="Skipped optimizer steps of the job, because a loss or gradient was infinite or NaN.",
    source="the training ranks, over the whole job",
    normal="0",
    absent="no iteration is finished",
    run_metric="nonfinite_steps",
)
GROUP_RESTARTS: Final = coordinator_counter(
    "rlhf_training_group_restarts_total",
    unit=Unit.NUMBER,
    meaning="Restarts of the training group since the coordinator started.",
    source="the scheduler",
    normal="one for each lost rank",
)
GROUP_EPOCH: Final = coordinator_gauge(
    "rlhf_training_group_epoch",
    unit=Unit.NUMBER,
    meaning="Number of the current training group; each new group has a higher number.",
    source="the coordinator",
    normal="1, plus one for each new group",
)
_UNTRAINED: Final = "no draft model is trained, or no iteration is finished"
_draft = partial(coordinator_gauge, absent=_UNTRAINED)
DRAFT_LOSS: Final = _draft(
    "rlhf_draft_model_loss_nats",
    unit=Unit.NUMBER,
    meaning="Cross entropy between the policy's and the draft model's next-token distributions, per token of the "
    "last finished iteration.",
    source="the training ranks with the policy's last stage",
    normal="falls at first, then follows the policy's entropy at a distance",
    run_metric="training/draft/loss",
)
DRAFT_DIVERGENCE: Final = _draft(
    "rlhf_draft_model_divergence_nats",
    unit=Unit.NUMBER,
    meaning="KL divergence of the policy from the draft model: the cross entropy minus the policy's own entropy.",
    source="the training ranks with the policy's last stage",
    normal="falls; if it rises, the policy changes faster than the draft model learns",
    run_metric="training/draft/divergence",
)
DRAFT_AGREEMENT: Final = _draft(
    "rlhf_draft_model_agreement_ratio",
    unit=Unit.RATIO,
    meaning="Share of tokens at which the draft model and the policy have the same most probable token.",
    source="the training ranks with the policy's last stage",
    normal="rises; at temperature 0 the policy accepts drafts about as often",
    run_metric="training/draft/agreement",
)
DRAFT_STEP_SECONDS: Final = _draft(
    "rlhf_draft_model_step_seconds",
    unit=Unit.SECONDS,
    meaning="Longest time per mini-batch of the last finished iteration that the training of the draft model took.",
    source="measured around its passes and its optimizer step, on the slowest rank",
    normal="a small part of rlhf_training_step_seconds, in addition to it; it follows the lengths of responses",
    run_metric="training/draft/step_seconds_max",
)
DRAFT_SKIPPED: Final = _draft(
    "rlhf_draft_model_skipped_steps",
    unit=Unit.NUMBER,
    meaning="Skipped steps of the draft model in the last finished iteration, because its gradient was not finite.",
    source="the training ranks with the policy's last stage",
    normal="0",
    run_metric="training/draft/skipped_steps",
)
DRAFT_BYTES: Final = _draft(
    "rlhf_draft_model_published_bytes",
    unit=Unit.BYTES,
    meaning="Size of the draft model that generation workers load with each version of the policy.",
    source="its parameters, in the number type of the job",
    normal="constant",
    run_metric="training/draft/published_bytes",
)
