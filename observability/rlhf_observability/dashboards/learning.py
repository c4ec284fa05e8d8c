"""Learning: progress of the policy and the critic, run by run.

Questions of a researcher who compares several jobs per panel, in the order of the rows:
- Which run is ahead, is its reward meaningful, and does it hold on prompts outside the training data?
- How far is the policy from its start, and does it still explore?
- Are the optimizer's steps of a reasonable size?
- Does the critic predict well, and what do custom metrics show?
"""

from typing import Final

from rlhf_common.metrics import run, samples
from rlhf_common.metrics.catalogue import METRICS
from rlhf_observability.dashboards.panels import (
    BY_JOB,
    Dashboard,
    PanelUnit,
    Query,
    Row,
    lines,
    lines_of,
    per_job,
    per_model,
    stat,
)
from rlhf_observability.promql import JOB, JOBS, top

_NAMES: Final = 20  # user metrics per panel
_TRAINED: Final = JOBS.narrowed('name=~"training/.+|rewards/.+/(mean|metrics/.+)"')
_KNOWN: Final = "|".join(
    sorted(metric.run_metric.replace("{model}", "[^/]+") for metric in METRICS if metric.run_metric)
)
"""Names in metrics.jsonl that have their own metric."""

AHEAD: Final = Row(
    "Which run is ahead?",
    (
        stat(
            title="Reward now",
            unit=PanelUnit.REWARD,
            decimals=3,
            shows=run.REWARD.meaning,
            normal=run.REWARD.normal,
            cure="Before you believe a jump, let the reward function log the responses that it likes best.",
            queries=(per_job(run.REWARD),),
        ),
        lines(
            title="Reward",
            unit=PanelUnit.REWARD,
            shows="Mean reward of training; of the last evaluation and the best one so far, where there are any.",
            normal=run.EVALUATION_REWARD.normal,
            cure="A fall to a constant is a broken reward or a collapsed policy. Evaluations far below the best for "
            "long: go back to the checkpoint that best.json names.",
            queries=(
                per_job(run.REWARD),
                Query(JOBS.latest(run.EVALUATION_REWARD), f"evaluation {BY_JOB}"),
                Query(JOBS.latest(run.EVALUATION_BEST), f"best evaluation {BY_JOB}"),
            ),
            low=None,
        ),
        lines_of(
            run.REWARD_STD,
            "Spread of the reward",
            "At 0 all samples are worth the same: take harder prompts, more samples of each, or a finer reward.",
        ),
        lines(
            title="Length of responses",
            unit=PanelUnit.TOKENS,
            shows="Median and 99th percentile of the lengths of finished responses.",
            normal=samples.RESPONSE_TOKENS.normal,
            cure="A percentile at maxResponseTokens is cut off: raise it, or let the reward punish length.",
            queries=(
                Query(JOBS.quantile(0.5, samples.RESPONSE_TOKENS, *JOB), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.99, samples.RESPONSE_TOKENS, *JOB), f"99% {BY_JOB}"),
            ),
        ),
        lines(
            title="Cut off",
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of responses that ended at rollout.maxResponseTokens.",
            normal="below 10% once the policy has learned to stop.",
            cure="Raise maxResponseTokens, or let the reward punish length.",
            queries=(
                Query(
                    f"{JOBS.rates(samples.TRUNCATED)} / ({JOBS.rates(samples.FINISHED)} > 0)",
                    BY_JOB,
                ),
            ),
        ),
    ),
)
FAR: Final = Row(
    "How far is the policy from where it began?",
    (
        lines_of(
            run.KL,
            "Divergence of a response",
            "A steep rise: raise klCoefficient, or set klTarget.",
            low=None,
        ),
        lines_of(
            run.KL_COEFFICIENT,
            "Weight of the divergence",
            "At its bound for long: the target cannot be met; change the reward or the target.",
        ),
        lines_of(
            run.ENTROPY,
            "Entropy",
            "Near 0 too early: a smaller learning rate, or a higher temperature.",
        ),
        lines(
            title="What is not trained on",
            unit=PanelUnit.SAMPLES,
            shows="Samples without a reward; those that were dropped, as all responses to their prompt have equal "
            "rewards, and those that took their place; those that were begun anew, as they were carried for too long.",
            normal="without a reward: 0, unless it abstains by design. Dropped: as many as refilled. Begun anew: few.",
            cure="Without a reward: read its log. Ever more dropped: prompts are too easy or too hard by now. More "
            "dropped than refilled: the rounds of refill are used up. Many begun anew: raise rollout.maxStaleness.",
            queries=(
                Query(JOBS.increases(samples.ABSTAINED), f"without a reward {BY_JOB}"),
                Query(JOBS.increases(samples.DROPPED), f"dropped {BY_JOB}"),
                Query(JOBS.increases(samples.REFILLED), f"refilled {BY_JOB}"),
                Query(JOBS.latest(run.RESTARTED), f"begun anew {BY_JOB}"),
            ),
        ),
    ),
)
STEPS: Final = Row(
    "Are steps of a sane size?",
    (
        lines_of(
            run.LOSS,
            "Loss",
            "A critic's that rises follows a reward that jumps; a policy's says little.",
            low=None,
        ),
        lines_of(
            run.APPROXIMATE_KL,
            "Divergence of one iteration",
            "Above 0.02: a smaller learning rate, fewer epochs, or smaller mini-batches.",
        ),
        lines_of(
            run.CLIPPED,
            "Clipped tokens",
            "Above 0.3 most of the batch teaches nothing: smaller steps.",
        ),
        lines_of(
            run.RATIO_MAX,
            "Largest ratio of probabilities",
            "Spikes with a low mismatch are steps that are too large; with a high one see the dashboard of training.",
            unit=PanelUnit.NUMBER,
        ),
    ),
)
CRITIC: Final = Row(
    "Does the critic predict, and what do my own metrics say?",
    (
        lines_of(
            run.EXPLAINED_VARIANCE,
            "Explained variance",
            "Below 0 for long: a larger learning rate of the critic, or a warm-up before the policy learns.",
            empty="of jobs without a critic",
            low=None,
        ),
        lines(
            title="Values and returns",
            unit=PanelUnit.REWARD,
            shows="Mean value that the critic predicts, and the mean return that it is trained on.",
            normal="near each other.",
            empty="of jobs without a critic",
            cure="Far apart: the critic lags behind the reward; see its explained variance.",
            queries=(per_model(run.VALUE_MEAN, "value"), per_model(run.RETURN_MEAN, "return")),
            low=None,
        ),
        lines(
            title="Rewards by name, and metrics without a panel",
            unit=PanelUnit.NUMBER,
            shows="Means of rewards by name and of what rewards give beside their number; what algorithms add to "
            "metrics.jsonl below `training/` and no metric of its own has, such as yours.",
            normal="rewards rise, or fall where their weight is negative; the others are what you made them for.",
            empty="where there are none",
            cure="A name that is missing was not finite, or came after the first 256 names.",
            queries=(
                Query(
                    top(_NAMES, _TRAINED.latest(run.ITERATION_METRIC, "name", name=f"!~{_KNOWN}")),
                    f"{{{{name}}}} {BY_JOB}",
                ),
            ),
            low=None,
        ),
    ),
)
LEARNING_DASHBOARD: Final = Dashboard(
    "rlhf-learning",
    "RLHF / Learning",
    "What policies and critics learn, run against run: reward, divergence, entropy, steps, values.",
    (AHEAD, FAR, STEPS, CRITIC),
    since="now-24h",
)
