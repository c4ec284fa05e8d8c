"""Alerts on learning: rewards, failing samples, divergence, mismatch, skipped steps.

Rule: a value that is not finite has no series, so RLHFRewardMissing tests for the absence of a reward. Means are over
time, as scrapes see it: an iteration of an hour has the weight of an hour.
"""

from typing import Final

from rlhf_observability.alerts.alert import Alert, AlertSeverity, Family, Threshold
from rlhf_observability.alerts.families.job_labels import AT_WORK, BY_JOB, JOB, ON_JOB, UNLESS_ENDED, WHO

REWARD_MISSING: Final = Alert(
    name="RLHFRewardMissing",
    severity=AlertSeverity.CRITICAL,
    when="iterations finish and none of their samples has a reward",
    expression=f"""\
max {BY_JOB} (rlhf_iteration_last_seconds)
unless {ON_JOB} max {BY_JOB} (rlhf_reward_mean)
{UNLESS_ENDED}""",
    lasts="10m",
    summary=f"Job {WHO} trains without a reward; its last iteration took {{{{ $value | humanizeDuration }}}}",
    description="Every sample abstained, or the mean is infinite or NaN: nothing is learned. Suspend the job until the "
    "reward is right.",
    normal="a number for every iteration",
)
REWARD_FAILING: Final = Alert(
    name="RLHFRewardFailing",
    severity=AlertSeverity.WARNING,
    when="over <failures> tries of a scoring task failed within <windowSeconds> seconds",
    expression=f"""\
sum by ({JOB}, task) (increase(rlhf_score_failures_total[<windowSeconds>s])) > <failures>
{AT_WORK}""",
    lasts="0s",
    summary=f'{{{{ $value | printf "%.0f" }}}} tries of {{{{ $labels.task }}}} failed in job {WHO}',
    description="It raised, took too long, or gave NaN or infinity. Each is tried again; one that fails "
    "spec.models.reward.retries times more ends the job.",
    normal="0; a few when an endpoint has an outage",
    thresholds=(
        Threshold("failures", 10, "tries that failed in the window"),
        Threshold("windowSeconds", 900, "seconds of the window"),
    ),
)
SAMPLES_FAILING: Final = Alert(
    name="RLHFSamplesFailing",
    severity=AlertSeverity.WARNING,
    when="over <failures> tries to decode a sample failed because of that sample within <windowSeconds> seconds",
    expression=f"""\
sum {BY_JOB} (increase(rlhf_decode_failures_total[<windowSeconds>s])) > <failures>
{AT_WORK}""",
    lasts="0s",
    summary=f'{{{{ $value | printf "%.0f" }}}} tries to decode a sample failed in job {WHO}',
    description="Workers fail on single samples. Each is tried again on another worker; one that fails "
    "spec.rollout.sampleRetries times more ends the job, or is left out where spec.rollout.maxFailedSamples allows it.",
    normal="0",
    thresholds=(
        Threshold("failures", 2, "tries that failed in the window"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
REWARD_COLLAPSED: Final = Alert(
    name="RLHFRewardCollapsed",
    severity=AlertSeverity.WARNING,
    when="the mean reward of <recentSeconds> seconds is over <deviations> standard deviations (of samples) below the "
    "best tenth of <windowSeconds> seconds",
    expression=f"""\
(
  max {BY_JOB} (quantile_over_time(0.9, rlhf_reward_mean[<windowSeconds>s]))
  - max {BY_JOB} (avg_over_time(rlhf_reward_mean[<recentSeconds>s]))
) > <deviations> * max {BY_JOB} (avg_over_time(rlhf_reward_std[<windowSeconds>s]))
{AT_WORK}""",
    lasts="10m",
    summary=f'The reward of job {WHO} fell by {{{{ $value | printf "%.3g" }}}}',
    description="Look at KL, entropy and response lengths beside it: a policy that collapses rarely comes back. An "
    "earlier checkpoint does.",
    normal="it rises, or wavers by less than its deviation",
    thresholds=(
        Threshold("deviations", 0.75, "standard deviations of samples' rewards"),
        Threshold("recentSeconds", 900, "seconds of the mean that has fallen"),
        Threshold("windowSeconds", 21600, "seconds in which it was better"),
    ),
)
KL_RUNAWAY: Final = Alert(
    name="RLHFKLRunaway",
    severity=AlertSeverity.WARNING,
    when="the divergence from the reference is over <natsPerToken> nats a token",
    expression=f"max {BY_JOB} (rlhf_kl_per_token) > <natsPerToken>\n{UNLESS_ENDED}",
    lasts="10m",
    summary=f'The policy of job {WHO} is {{{{ $value | printf "%.3g" }}}} nats a token from its reference',
    description="It has left what the reference would say, often to please the reward: read some responses. Lower the "
    "learning rate, or raise the weight of the KL term.",
    normal="0 to 0.1 nats a token",
    thresholds=(Threshold("natsPerToken", 0.5, "nats a token"),),
)
MISMATCH: Final = Alert(
    name="RLHFMismatchHigh",
    severity=AlertSeverity.WARNING,
    when="log-probabilities of generation and training differ by over <nats> nats on average, at the same weights",
    expression=f"max by ({JOB}, model) (rlhf_policy_mismatch) > <nats>\n{UNLESS_ENDED}",
    lasts="10m",
    summary=f'Engine and trainer of job {WHO} disagree by {{{{ $value | printf "%.3g" }}}} nats a token',
    description="The ratio of the policy loss is biased by as much. Engine and trainer compute in different "
    "precisions, or with different kernels, or one has other weights.",
    normal="below 1e-4 in float32, 0.01 in bfloat16",
    thresholds=(Threshold("nats", 0.05, "mean difference in nats"),),
)
NONFINITE: Final = Alert(
    name="RLHFNonfiniteSteps",
    severity=AlertSeverity.WARNING,
    when="<steps> or more optimizer steps were skipped within <windowSeconds> seconds, as a loss or gradient "
    "was infinite or NaN",
    expression=f"""\
max {BY_JOB} (
  max_over_time(rlhf_nonfinite_steps_total[<windowSeconds>s])
  - min_over_time(rlhf_nonfinite_steps_total[<windowSeconds>s])
) >= <steps>
{AT_WORK}""",
    lasts="0s",
    summary=f'{{{{ $value | printf "%.0f" }}}} optimizer steps of job {WHO} were skipped: their loss was not finite',
    description="Weights stayed as they were in those steps; maxNonFiniteSteps in a row fail the job. The event "
    "StepsSkipped names the iteration.",
    normal="0; a few in float16",
    thresholds=(
        Threshold("steps", 3, "skipped steps in the window"),
        Threshold("windowSeconds", 3600, "seconds of the window"),
    ),
)
LEARNING: Final = Family(
    "learning",
    "what a job learns",
    (REWARD_MISSING, REWARD_FAILING, SAMPLES_FAILING, REWARD_COLLAPSED, KL_RUNAWAY, MISMATCH, NONFINITE),
)
