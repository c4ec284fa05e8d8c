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
            title="Current reward",
            unit=PanelUnit.REWARD,
            decimals=3,
            shows=run.REWARD.meaning,
            normal=run.REWARD.normal,
            cure="Before you trust a jump, let the reward function log the responses with the highest reward.",
            queries=(per_job(run.REWARD),),
        ),
        lines(
            title="Reward",
            unit=PanelUnit.REWARD,
            shows="Mean reward of training, of the last evaluation and of the best evaluation so far.",
            normal=run.EVALUATION_REWARD.normal,
            cure="A fall to a constant means a broken reward or a collapsed policy. If evaluations stay far below the "
            "best one, return to the checkpoint that best.json names.",
            queries=(
                per_job(run.REWARD),
                Query(JOBS.latest(run.EVALUATION_REWARD), f"evaluation {BY_JOB}"),
                Query(JOBS.latest(run.EVALUATION_BEST), f"best evaluation {BY_JOB}"),
            ),
            low=None,
        ),
        lines_of(
            run.REWARD_STD,
            "Standard deviation of the reward",
            "At 0 all samples have the same reward: use harder prompts, more samples per prompt, or a finer reward.",
        ),
        lines(
            title="Length of responses",
            unit=PanelUnit.TOKENS,
            shows="Median and 99th percentile of the lengths of finished responses.",
            normal=samples.RESPONSE_TOKENS.normal,
            cure="If a percentile is at maxResponseTokens, the engine truncates responses: raise the limit, or let "
            "the reward penalize length.",
            queries=(
                Query(JOBS.quantile(0.5, samples.RESPONSE_TOKENS, *JOB), f"median {BY_JOB}"),
                Query(JOBS.quantile(0.99, samples.RESPONSE_TOKENS, *JOB), f"99% {BY_JOB}"),
            ),
        ),
        lines(
            title="Truncated responses",
            unit=PanelUnit.SHARE,
            high=1,
            shows="Share of responses that ended at rollout.maxResponseTokens.",
            normal="below 10% once the policy has learned to stop.",
            cure="Raise maxResponseTokens, or let the reward penalize length.",
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
    "How far is the policy from its reference?",
    (
        lines_of(
            run.KL,
            "KL divergence of a response",
            "If it rises steeply, raise klCoefficient or set klTarget.",
            low=None,
        ),
        lines_of(
            run.KL_COEFFICIENT,
            "KL coefficient",
            "If it stays at its bound, the policy cannot meet the target: change the reward or the target.",
        ),
        lines_of(
            run.ENTROPY,
            "Entropy",
            "If it is near 0 too early, use a smaller learning rate or a higher temperature.",
        ),
        lines(
            title="Samples left out of training",
            unit=PanelUnit.SAMPLES,
            shows="Samples without a reward; samples that were dropped because all responses to their prompt have "
            "equal rewards; samples that replaced dropped ones; samples that restarted because they were too old.",
            normal="0 samples without a reward, unless the reward abstains by design; as many replaced as dropped; few "
            "restarted.",
            cure="For samples without a reward, read the log of the reward. If more and more samples are dropped, "
            "prompts are too easy or too hard. If fewer are replaced than dropped, the rounds of refill are used "
            "up. If many restart, raise rollout.maxStaleness.",
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
    "Do steps have a reasonable size?",
    (
        lines_of(
            run.LOSS,
            "Loss",
            "If a critic's loss rises, its reward may have jumped. The value of a policy's loss means little.",
            low=None,
        ),
        lines_of(
            run.APPROXIMATE_KL,
            "KL divergence of one iteration",
            "Above 0.02, use a smaller learning rate, fewer epochs or smaller mini-batches.",
        ),
        lines_of(
            run.CLIPPED,
            "Clipped tokens",
            "Above 0.3, most of the batch has no effect: use smaller steps.",
        ),
        lines_of(
            run.RATIO_MAX,
            "Largest ratio of probabilities",
            "Spikes with a low mismatch mean steps that are too large. With a high mismatch, open the Training "
            "dashboard.",
            unit=PanelUnit.NUMBER,
        ),
    ),
)
CRITIC: Final = Row(
    "Does the critic predict well, and how do other metrics develop?",
    (
        lines_of(
            run.EXPLAINED_VARIANCE,
            "Explained variance",
            "If it stays below 0, use a larger learning rate for the critic, or a warm-up before the policy learns.",
            empty="for jobs without a critic",
            low=None,
        ),
        lines(
            title="Values and returns",
            unit=PanelUnit.REWARD,
            shows="Mean value that the critic predicts, and mean return in its training data.",
            normal="near each other.",
            empty="for jobs without a critic",
            cure="If they are far apart, the critic lags behind the reward: check its explained variance.",
            queries=(per_model(run.VALUE_MEAN, "value"), per_model(run.RETURN_MEAN, "return")),
            low=None,
        ),
        lines(
            title="Rewards by name, and metrics without a panel",
            unit=PanelUnit.NUMBER,
            shows="Means of rewards by name, extra values of rewards, and metrics below `training/` in metrics.jsonl "
            "without a metric of their own, such as those of your algorithm.",
            normal="rewards rise, or fall if their weight is negative; the meaning of other metrics is yours. No name "
            "begins with nonfinite/.",
            empty="if there are no such metrics",
            cure="A name that begins with nonfinite/ was infinite or NaN. A missing name came after the first 256 "
            "names.",
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
    "What policies and critics learn in several runs: reward, divergence, entropy, steps and values.",
    (AHEAD, FAR, STEPS, CRITIC),
    since="now-24h",
)
