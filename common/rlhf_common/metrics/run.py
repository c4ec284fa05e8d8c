"""Results of an iteration, such as reward, divergence, lengths and losses.

Rule: a value that was not measured, is infinite or is NaN has no series; `rlhf_iteration_metric` then names the last
two `nonfinite/<name>`.
"""

from functools import partial
from typing import Final

from rlhf_common.metrics import labels
from rlhf_common.metrics.metric import Unit, coordinator_gauge

NON_FINITE: Final = "nonfinite/"
"""Prefix of the name of a run metric that was infinite or NaN; the metric with the prefix is 1."""
_NONE: Final = "no iteration is finished, or it has no such number"
_gauge = partial(coordinator_gauge, absent=_NONE)
_of_model = partial(_gauge, labels=(labels.MODEL,))

ITERATION_METRIC: Final = _gauge(
    "rlhf_iteration_metric",
    unit=Unit.NUMBER,
    meaning="Every metric of the last finished iteration, by its name in metrics.jsonl. The name `nonfinite/<name>` "
    "has the value 1 where the metric `<name>` was infinite or NaN.",
    source="metrics.jsonl",
    normal="no name begins with nonfinite/; for most values use the metric with a name of its own, and this one "
    "for values of a user's algorithm",
    labels=(labels.RUN_METRIC,),
)
ITERATION_LAST: Final = _gauge(
    "rlhf_iteration_last_seconds",
    unit=Unit.SECONDS,
    meaning="Time of the last finished iteration.",
    source="from the end of the previous iteration to its own end",
    normal="steady; longer as responses get longer",
    run_metric="seconds/iteration",
)
SAMPLES_PER_SECOND: Final = _gauge(
    "rlhf_iteration_samples_per_second",
    unit=Unit.SAMPLES_PER_SECOND,
    meaning="Samples trained per second of the last finished iteration.",
    source="batch size / rlhf_iteration_last_seconds",
    normal="steady",
    run_metric="samples_per_second",
)
TOKENS_PER_SECOND: Final = _gauge(
    "rlhf_iteration_tokens_per_second",
    unit=Unit.TOKENS_PER_SECOND,
    meaning="Response tokens per second of the last finished iteration.",
    source="response tokens / rlhf_iteration_last_seconds",
    normal="steady",
    run_metric="tokens_per_second",
)
CONTROL: Final = _gauge(
    "rlhf_control_ratio",
    unit=Unit.RATIO,
    meaning="Share of the last iteration that the coordinator itself added to its critical path.",
    source="time from the message that ended a phase to the commands of the next one / time of the iteration",
    normal="below 0.01",
    run_metric="control_share",
)

# ---------------------------------------------------------------- rewards, divergence, lengths

REWARD: Final = _gauge(
    "rlhf_reward_mean",
    unit=Unit.REWARD,
    meaning="Mean reward of the samples that have one.",
    source="scores of the iteration",
    normal="rises and levels off; a jump often means a broken reward",
    run_metric="reward",
)
REWARD_STD: Final = _gauge(
    "rlhf_reward_std",
    unit=Unit.REWARD,
    meaning="Standard deviation of the reward over samples, with the number of samples as divisor.",
    source="scores of the iteration",
    normal="above 0; at 0 the policy cannot learn from the batch",
    run_metric="reward_std",
)
EVALUATION_REWARD: Final = _gauge(
    "rlhf_evaluation_reward_mean",
    unit=Unit.REWARD,
    meaning="Mean reward of the last evaluation.",
    source="scores of responses that the job does not train on",
    normal="rises with rlhf_reward_mean; if rlhf_reward_mean rises without it, the policy overfits its prompts "
    "or its sampling",
    run_metric="evaluation/reward",
)
EVALUATION_BEST: Final = _gauge(
    "rlhf_evaluation_best_reward",
    unit=Unit.REWARD,
    meaning="Mean reward of the best evaluation so far.",
    source="the evaluations of the run",
    normal="not far above rlhf_evaluation_reward_mean",
    run_metric="evaluation/best_reward",
)
EVALUATION_WAITED: Final = _gauge(
    "rlhf_evaluation_waited_seconds",
    unit=Unit.SECONDS,
    meaning="Time for which the iteration waited for the last evaluation.",
    source="time in which the iteration had no other work left",
    normal="near 0; if not, evaluate fewer prompts or add generation workers",
    run_metric="evaluation/waited_seconds",
)
KL: Final = _gauge(
    "rlhf_kl",
    unit=Unit.NATS,
    meaning="KL divergence of the policy from the reference, summed over a response, as a mean over responses.",
    source="log p - log q of the sampled tokens",
    normal="rises slowly; stays near algorithm.*.klTarget if that is set",
    run_metric="kl",
)
KL_PER_TOKEN: Final = _gauge(
    "rlhf_kl_per_token",
    unit=Unit.NATS,
    meaning="KL divergence of the policy from the reference, as a mean over tokens.",
    source="log p - log q of the sampled tokens",
    normal="0 to 0.1; far above that, the policy has left the reference",
    run_metric="kl_per_token",
)
KL_COEFFICIENT: Final = _of_model(
    "rlhf_kl_coefficient",
    unit=Unit.NUMBER,
    meaning="Weight of the KL divergence in the loss or the reward.",
    source="the algorithm, which adapts it to klTarget if that is set",
    normal="constant, or changes slowly",
    run_metric="training/{model}/kl_coefficient",
)
RESPONSE_MEAN: Final = _gauge(
    "rlhf_response_tokens_mean",
    unit=Unit.TOKENS,
    meaning="Mean length of the iteration's responses.",
    source="its samples",
    normal="changes slowly; if it rises with the reward, the policy may exploit the reward",
    run_metric="response_tokens_mean",
)
RESPONSE_MAX: Final = _gauge(
    "rlhf_response_tokens_max",
    unit=Unit.TOKENS,
    meaning="Length of the iteration's longest response.",
    source="its samples",
    normal="at most rollout.maxResponseTokens",
    run_metric="response_tokens_max",
)
CUT_TOKENS: Final = _gauge(
    "rlhf_cut_tokens",
    unit=Unit.TOKENS,
    meaning="Tokens of samples that were cut off or failed, in the last iteration.",
    source="its samples",
    normal="0 without rollout.oversample; these tokens are lost, unless rollout.maxStaleness is above 0",
    run_metric="tokens_cut",
)
_rounds = partial(_gauge, absent="rollout.longRounds is Disabled, or no iteration is finished")
LONG_ROUND: Final = _rounds(
    "rlhf_long_round",
    unit=Unit.NUMBER,
    meaning="1 if the last iteration was a long round, which decodes prompts that were cut off; else 0.",
    source="the number of the iteration",
    normal="1 in rollout.oversample of (prompts of a batch + rollout.oversample) iterations",
    run_metric="rollout/long_round",
)
WAITING_PROMPTS: Final = _rounds(
    "rlhf_waiting_prompts",
    unit=Unit.NUMBER,
    meaning="Prompts that were cut off and wait for a long round.",
    source="the ledger, when the iteration ends",
    normal="below the prompts of a batch + rollout.oversample; the job does not train on those that wait at its end",
    run_metric="prompts/waiting",
)
SURPLUS_PROMPTS: Final = _gauge(
    "rlhf_surplus_prompts",
    unit=Unit.NUMBER,
    meaning="Prompts that a short round begins beyond those of its batch, as chosen; 0 means no long rounds.",
    source="the schedule in force, which the iteration's first record has",
    normal="0, or up to half of the prompts of a batch; the event long-rounds-choice says why",
    absent="rollout.longRounds is not Auto, or no iteration is finished",
    run_metric="rollout/surplus_prompts",
)
_windows = partial(_gauge, absent="prompts.lengthWindow is 0 or 1, or no iteration is finished")
SORTED_BATCH: Final = _windows(
    "rlhf_sorted_batch",
    unit=Unit.NUMBER,
    meaning="1 if the last iteration had a batch of a sorted window, with prompts of like expected lengths; else 0.",
    source="the iteration's first record",
    normal="0 in the first epoch, then 1",
    run_metric="rollout/sorted_batch",
)
EXPECTED_TOKENS: Final = _windows(
    "rlhf_expected_response_tokens",
    unit=Unit.TOKENS,
    meaning="Mean length of the iteration's responses as earlier epochs predict it, over prompts of known length.",
    source="lengths of earlier responses to the same prompts",
    normal="close to rlhf_response_tokens_mean, while the policy changes slowly; absent in the first epoch",
    run_metric="rollout/expected_tokens_mean",
)
CUT_DRAFT_TOKENS: Final = _gauge(
    "rlhf_cut_draft_tokens",
    unit=Unit.TOKENS,
    meaning="Tokens of earlier responses that draft for later samples of their prompts, those that were cut off "
    "included.",
    source="the coordinator's store of draft hints, when the iteration ends",
    normal="rises in short rounds and falls in long ones; at most 8 million",
    absent="rollout.keepCut is Nothing, or no iteration is finished",
    run_metric="rollout/draft_tokens_kept",
)

_carried = partial(_gauge, absent="rollout.maxStaleness is 0, or no iteration is finished")
_aged = partial(
    _gauge, absent="rollout.maxStaleness is 0 and rollout.overlapTraining Disabled, or no iteration is finished"
)
CARRIED: Final = _carried(
    "rlhf_carried_samples",
    unit=Unit.SAMPLES,
    meaning="Samples that continue from the previous iteration, which cut them.",
    source="its first samples",
    normal="rollout.oversample times the samples per prompt; 0 in the first iteration",
    run_metric="samples/carried",
)
CARRIED_TOKENS: Final = _carried(
    "rlhf_carried_tokens",
    unit=Unit.TOKENS,
    meaning="Tokens of the continued samples that earlier iterations decoded.",
    source="its first samples",
    normal="the tokens that would be lost with rollout.maxStaleness 0",
    run_metric="tokens_carried",
)
RESTARTED: Final = _carried(
    "rlhf_restarted_samples",
    unit=Unit.SAMPLES,
    meaning="Samples that restarted because a token was older than rollout.maxStaleness allows.",
    source="its first samples",
    normal="few; if there are many, raise rollout.maxStaleness or lower rollout.oversample",
    run_metric="samples/restarted",
)
STALENESS_MEAN: Final = _aged(
    "rlhf_staleness_mean",
    unit=Unit.NUMBER,
    meaning="Age of a trained token in weight versions, as a mean: the version in training minus the version "
    "that decoded the token.",
    source="weight versions of the responses",
    normal="well below 1, or 1 with rollout.overlapTraining; clipping rises with it",
    run_metric="staleness/mean",
)
STALENESS_MAX: Final = _aged(
    "rlhf_staleness_max",
    unit=Unit.NUMBER,
    meaning="Age of the oldest trained token in weight versions.",
    source="weight versions of the responses",
    normal="at most rollout.maxStaleness, or 1 with rollout.overlapTraining",
    run_metric="staleness/max",
)

# ---------------------------------------------------------------- measurements of training

LOSS: Final = _of_model(
    "rlhf_loss",
    unit=Unit.NUMBER,
    meaning="Loss, as a mean over optimizer steps.",
    source="the training ranks",
    normal="near 0 for a policy; falls for a critic",
    run_metric="training/{model}/loss",
)
GRADIENT_NORM: Final = _of_model(
    "rlhf_gradient_norm",
    unit=Unit.NUMBER,
    meaning="Norm of the gradient before clipping, as a mean over optimizer steps.",
    source="the training ranks",
    normal="steady; a spike of ten times often precedes a collapse",
    run_metric="training/gradient_norm/{model}",
)
EXPERT_LOAD: Final = _of_model(
    "rlhf_expert_load",
    unit=Unit.NUMBER,
    meaning="Number of tokens of the most loaded expert of any layer, divided by an even share, in the last "
    "finished iteration.",
    source="the training ranks, from every forward pass of training",
    normal="steady; at the maximum, experts per layer / experts per token, all tokens go to the same few experts",
    absent="the model has no experts, or no iteration is finished",
    run_metric="training/train/expert_load/{model}",
)
EXPERTS_UNUSED: Final = _of_model(
    "rlhf_experts_unused_ratio",
    unit=Unit.RATIO,
    meaning="Share of experts that no token chose in the last finished iteration, in the layer with the largest share.",
    source="the training ranks, from every forward pass of training",
    normal="0 in long batches; if it grows, the router uses fewer experts than before, and they rarely return",
    absent="the model has no experts, or no iteration is finished",
    run_metric="training/train/experts_unused/{model}",
)
LEARNING_RATE: Final = _of_model(
    "rlhf_learning_rate",
    unit=Unit.NUMBER,
    meaning="Learning rate of the last optimizer step.",
    source="the schedule of the manifest",
    normal="the value of the schedule",
    run_metric="training/learning_rate/{model}",
)
ENTROPY: Final = _of_model(
    "rlhf_policy_entropy",
    unit=Unit.NATS,
    meaning="Entropy of the policy's next-token distribution, as a mean over tokens.",
    source="the training ranks",
    normal="falls slowly; near 0 the policy no longer explores",
    run_metric="training/{model}/entropy",
)
CLIPPED: Final = _of_model(
    "rlhf_clip_ratio",
    unit=Unit.RATIO,
    meaning="Share of tokens whose loss was clipped.",
    source="the training ranks",
    normal="below 0.3",
    run_metric="training/{model}/clip_fraction",
)
APPROXIMATE_KL: Final = _of_model(
    "rlhf_policy_update_kl",
    unit=Unit.NATS,
    meaning="KL divergence of the policy that sampled from the policy in training, as a mean over tokens and steps.",
    source="k3 estimator: r - 1 - log r, where r is the ratio of probabilities",
    normal="below 0.02; above that, steps are too large",
    run_metric="training/{model}/approximate_kl",
)
RATIO_MAX: Final = _of_model(
    "rlhf_policy_probability_max_ratio",
    unit=Unit.RATIO,
    meaning="Largest ratio of a token's probability during training to its probability at sampling.",
    source="the training ranks",
    normal="below 10",
    run_metric="training/{model}/ratio_max",
)
MISMATCH: Final = _of_model(
    "rlhf_policy_mismatch",
    unit=Unit.NATS,
    meaning="Mean difference of log-probabilities between the generation engine and the trainer, at the same weights.",
    source=(
        "mean of |log p trainer - log p engine| over tokens of the first optimizer step of an iteration, "
        "with oldLogProbabilities Trainer over all of its tokens"
    ),
    normal="below 1e-4 in float32, below 0.01 in bfloat16; above that, the policy gradient is biased",
    run_metric="training/{model}/mismatch",
)
MISMATCH_MAX: Final = _of_model(
    "rlhf_policy_mismatch_max",
    unit=Unit.NATS,
    meaning="Largest difference of a token's log-probability between the generation engine and the trainer.",
    source="maximum of |log p trainer - log p engine| over the same tokens",
    normal="below 1",
    run_metric="training/{model}/mismatch_max",
)
MISMATCH_KL: Final = _of_model(
    "rlhf_policy_mismatch_kl",
    unit=Unit.NATS,
    meaning="KL divergence of the generation engine's policy from the trainer's, KL(engine || trainer), at the "
    "same weights, as a mean over tokens.",
    source="k3 estimator over the same tokens: exp(d) - 1 - d with d = log p trainer - log p engine",
    normal="below 1e-3; above 0.01 the job needs importance weights (mismatchCorrection) or another precision",
    run_metric="training/{model}/mismatch_kl",
)
MISMATCH_CORRECTED: Final = _of_model(
    "rlhf_policy_mismatch_corrected_ratio",
    unit=Unit.RATIO,
    meaning="Share of tokens whose ratio to the engine was outside the limits of mismatchCorrection.",
    source="truncated or masked tokens / tokens of the iteration; needs oldLogProbabilities Trainer",
    normal="below 0.01; with SequenceMask it rises with the length of responses",
    run_metric="training/{model}/mismatch_corrected",
)
EXPLAINED_VARIANCE: Final = _of_model(
    "rlhf_value_explained_variance",
    unit=Unit.NUMBER,
    meaning="Share of the variance of returns that the critic explains.",
    source="1 - Var(return - value) / Var(return)",
    normal="rises towards 1; below 0 the critic is worse than a constant",
    run_metric="training/{model}/explained_variance",
)
RETURN_MEAN: Final = _of_model(
    "rlhf_return_mean",
    unit=Unit.REWARD,
    meaning="Mean return in the critic's training data.",
    source="the training ranks",
    normal="follows the reward",
    run_metric="training/{model}/return_mean",
)
VALUE_MEAN: Final = _of_model(
    "rlhf_value_mean",
    unit=Unit.REWARD,
    meaning="Mean value that the critic predicts.",
    source="the training ranks",
    normal="near rlhf_return_mean",
    run_metric="training/{model}/value_mean",
)
