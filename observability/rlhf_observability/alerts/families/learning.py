"""Alerts on learning: rewards, failing samples, divergence, mismatch, skipped steps.

Rule: a value that is infinite or NaN has no series of its own. Alerts on divergence and mismatch read
`nonfinite/<name>` for it, and RLHFRewardMissing tests for the absence of a reward.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.families.job_labels import AT_WORK, BY_JOB, JOB, ON_JOB, UNLESS_ENDED, WHO

REWARD_MISSING: Final = Alert(
    name="RLHFRewardMissing",
    severity=AlertSeverity.CRITICAL,
    when="iterations finish without a finite mean reward",
    expression=f"""\
max {BY_JOB} (rlhf_iteration_last_seconds)
unless {ON_JOB} max {BY_JOB} (rlhf_reward_mean)
{UNLESS_ENDED}""",
    lasts="10m",
    summary=f"Job {WHO} trains without a reward; its last iteration took {{{{ $value | humanizeDuration }}}}",
    description="Every sample abstained, or the mean reward is infinite or NaN, so the job learns nothing. Suspend "
    "the job until the reward is correct.",
    normal="a finite number for every iteration",
)
REWARD_FAILING: Final = Alert(
    name="RLHFRewardFailing",
    severity=AlertSeverity.WARNING,
    when="more than <failures> attempts of a scoring task failed within <windowSeconds> seconds",
    expression=f"""\
sum by ({JOB}, task) (increase(rlhf_score_failures_total[<windowSeconds>s])) > <failures>
{AT_WORK}""",
    lasts="0s",
    summary=f'{{{{ $value | printf "%.0f" }}}} attempts of task {{{{ $labels.task }}}} failed in job {WHO}',
    description="An attempt raised an error, exceeded its time-out, or returned NaN or infinity. The coordinator "
    "tries a failed task again. A task that fails spec.models.reward.retries more times ends the job, "
    "unless spec.models.reward.onFailure is Abstain.",
    normal="0; a few during an outage of an endpoint",
    thresholds=(
        Threshold("failures", 10, "failed attempts within the window"),
        Threshold("windowSeconds", 900, "seconds of the window"),
    ),
)
SAMPLES_FAILING: Final = Alert(
    name="RLHFSamplesFailing",
    severity=AlertSeverity.WARNING,
    when="more than <failures> attempts to decode a sample failed because of that sample within "
    "<windowSeconds> seconds",
    expression=f"""\
sum {BY_JOB} (increase(rlhf_decode_failures_total[<windowSeconds>s])) > <failures>
{AT_WORK}""",
    lasts="0s",
    summary=f'{{{{ $value | printf "%.0f" }}}} attempts to decode a sample failed in job {WHO}',
    description="Workers fail on single samples. The coordinator tries each failed sample again on another worker. A "
    "sample that fails spec.rollout.sampleRetries more times ends the job, unless "
    "spec.rollout.maxFailedSamples lets the iteration leave it out.",
    normal="0",
    thresholds=(
        Threshold("failures", 2, "failed attempts within the window"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
REWARD_COLLAPSED: Final = Alert(
    name="RLHFRewardCollapsed",
    severity=AlertSeverity.WARNING,
    when="the mean reward of the last <recentSeconds> seconds is more than <deviations> standard deviations "
    "of samples below the 90th percentile of the last <windowSeconds> seconds",
    expression=f"""\
(
  max {BY_JOB} (quantile_over_time(0.9, rlhf_reward_mean[<windowSeconds>s]))
  - max {BY_JOB} (avg_over_time(rlhf_reward_mean[<recentSeconds>s]))
) > <deviations> * max {BY_JOB} (avg_over_time(rlhf_reward_std[<windowSeconds>s]))
{AT_WORK}""",
    lasts="10m",
    summary=f'The reward of job {WHO} fell by {{{{ $value | printf "%.3g" }}}}',
    description="Compare KL, entropy and response lengths. A collapsed policy rarely recovers; start again from an "
    "earlier checkpoint.",
    normal="it rises, or varies by less than its standard deviation",
    thresholds=(
        Threshold("deviations", 0.75, "standard deviations of the rewards of samples"),
        Threshold("recentSeconds", 900, "seconds of the recent mean"),
        Threshold("windowSeconds", 21600, "seconds of the window"),
    ),
)
KL_RUNAWAY: Final = Alert(
    name="RLHFKLRunaway",
    severity=AlertSeverity.WARNING,
    when="the KL divergence from the reference is more than <natsPerToken> nats per token, infinite or NaN",
    expression=f"""\
(
  max {BY_JOB} (rlhf_kl_per_token) > <natsPerToken>
  or
  max {BY_JOB} (rlhf_iteration_metric{{name=~"nonfinite/(kl|kl_per_token)"}}) * NaN
)
{UNLESS_ENDED}""",
    lasts="10m",
    summary=f'The policy of job {WHO} is {{{{ $value | printf "%.3g" }}}} nats per token from its reference',
    description="The policy generates text that the reference would not, often to exploit the reward: read some "
    "responses. Lower the learning rate, or raise the weight of the KL term. NaN also stands for an "
    "infinite divergence.",
    normal="0 to 0.1 nats per token",
    thresholds=(Threshold("natsPerToken", 0.5, "nats per token"),),
)
MISMATCH: Final = Alert(
    name="RLHFMismatchHigh",
    severity=AlertSeverity.WARNING,
    when="log-probabilities of engine and trainer differ by more than <nats> nats on average at the same "
    "weights, or their difference is infinite or NaN",
    expression=f"""\
(
  max by ({JOB}, model) (rlhf_policy_mismatch) > <nats>
  or
  max by ({JOB}, model) (
    label_replace(
      rlhf_iteration_metric{{name=~"nonfinite/training/.+/mismatch(_kl|_max)?"}},
      "model", "$1", "name", "nonfinite/training/(.+)/mismatch.*"
    )
  ) * NaN
)
{UNLESS_ENDED}""",
    lasts="10m",
    summary=f'Log-probabilities of engine and trainer of job {WHO} differ by {{{{ $value | printf "%.3g" }}}} nats '
    "per token",
    description="The ratio of the policy loss is biased by the same amount. Engine and trainer use different "
    "precisions, kernels or weights. NaN also stands for an infinite difference.",
    normal="below 1e-4 in float32, below 0.01 in bfloat16",
    thresholds=(Threshold("nats", 0.05, "mean difference in nats per token"),),
)
NONFINITE: Final = Alert(
    name="RLHFNonfiniteSteps",
    severity=AlertSeverity.WARNING,
    when="at least <steps> optimizer steps were skipped within <windowSeconds> seconds, because a loss or "
    "gradient was infinite or NaN",
    expression=f"""\
max {BY_JOB} (
  max_over_time(rlhf_nonfinite_steps_total[<windowSeconds>s])
  - min_over_time(rlhf_nonfinite_steps_total[<windowSeconds>s])
) >= <steps>
{AT_WORK}""",
    lasts="0s",
    summary=f'{{{{ $value | printf "%.0f" }}}} optimizer steps of job {WHO} were skipped, because a loss or gradient '
    "was not finite",
    description="A skipped step changes no weight. More than maxNonFiniteSteps skipped steps in a row fail the job. "
    "The event StepsSkipped names the iteration.",
    normal="0",
    thresholds=(
        Threshold("steps", 3, "skipped steps within the window"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
LEARNING: Final = Family(
    "learning",
    "what a job learns",
    (REWARD_MISSING, REWARD_FAILING, SAMPLES_FAILING, REWARD_COLLAPSED, KL_RUNAWAY, MISMATCH, NONFINITE),
)
