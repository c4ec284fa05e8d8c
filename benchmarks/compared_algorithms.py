"""The rows of benchmarks/algorithms.py: what each algorithm trains the quickstart's policy with, and what it must gain.

Every row is the quickstart's manifest (examples/quickstart/grpo.yaml) with another `spec.algorithm`, and what else that
one needs. Pairs are those of the pipeline's own script (examples/pipeline/make_data.py), and so is what a judge is
taught by. Gains are well below what was seen, so that a row that fails has failed.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

JUDGE: Final = "judge"
"""Folder of the trained judge, beside the quickstart's."""
LONGEST: Final = 12
"""Tokens of a response at most, one for each character, as the quickstart's manifest says."""
COST: Final = '''"""What is not to be said: what is beyond the longest right answer, of seven characters, as a share."""


def score(prompt, response, record):
    return max(0, len(response) - 7) / max(1, len(response))
'''


@dataclass(frozen=True)
class ComparedAlgorithm:
    """One run of the table."""

    algorithm: Mapping[str, Any]
    """`spec.algorithm`."""
    gain: float = 0.3
    """By how much the figure must be higher at last than at first."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Path in the manifest -> value, for what else the algorithm needs; None takes it out."""
    figure: str = "reward"
    """What is compared, a name in metrics.jsonl; the quickstart's reward is the share of right answers. Empty: the
    share of held-out prompts that the policy answers right, before and after."""
    of: str = "right answers"
    """What the figure is."""
    judged: bool = False
    """Whether it needs the trained judge."""


def of_pairs(**models: Any) -> dict[str, Any]:
    """Return the manifest's paths for a job on the file of pairs, which generates nothing."""
    return {
        "models": {"actor": {"path": "assets/policy"}, **models},
        "prompts.path": "pipeline/pairs.jsonl",
        "generation": None,
        "inference": None,
    }


def by_judge(template: str, **settings: Any) -> dict[str, Any]:
    """Return the manifest's paths for a reward by the judge; right answers are counted beside it, and weigh nothing."""
    judge = {"model": {"path": f"{JUDGE}/actor"}, "template": template, **settings}
    right = {"function": {"file": "reward.py", "name": "score"}}
    return {
        "models.reward": None,
        "models.rewards": [{"name": "judge", "judge": judge}, {"name": "right", "weight": 0.0, **right}],
    }


GROUP: Final = {"groupSize": 8, "klCoefficient": 0.01, "miniBatchSize": 64}
RIGHT: Final = "rewards/right/mean"
ROWS: Final[Mapping[str, ComparedAlgorithm]] = {
    "ppo": ComparedAlgorithm({"ppo": {"klCoefficient": 0.01, "miniBatchSize": 64}}),
    "grpo": ComparedAlgorithm({"grpo": GROUP}),
    "grpo-lora": ComparedAlgorithm(
        {"grpo": GROUP},
        0.2,
        {"training.lora": {"rank": 8, "alpha": 16}, "training.optimizer.learningRate": 3e-3},
    ),
    "dr-grpo": ComparedAlgorithm({"grpo": {**GROUP, "advantageScale": "None", "lossAggregation": "ConstantLength"}}),
    "rloo": ComparedAlgorithm({"rloo": GROUP}),
    "rloo-token": ComparedAlgorithm({"rloo": {**GROUP, "ratioLevel": "Token"}}),
    "reinforce++": ComparedAlgorithm({"reinforcePlusPlus": {**GROUP, "groupSize": 1}}),
    "reinforce++-baseline": ComparedAlgorithm(
        {"reinforcePlusPlus": {**GROUP, "baseline": "GroupMean", "klIn": "Loss", "klEstimator": "K2"}}
    ),
    "remax": ComparedAlgorithm({"remax": {**GROUP, "groupSize": 1}}),
    "gspo": ComparedAlgorithm({"gspo": {"groupSize": 8, "miniBatchSize": 64}}),
    "gspo-token": ComparedAlgorithm({"gspo": {"groupSize": 8, "miniBatchSize": 64, "ratioLevel": "Token"}}),
    "cispo": ComparedAlgorithm({"cispo": {"groupSize": 8, "miniBatchSize": 64}}),
    "dapo": ComparedAlgorithm({"dapo": {"groupSize": 8, "miniBatchSize": 64}}),
    "safe-rlhf": ComparedAlgorithm(
        {"safeRlhf": {"klCoefficient": 0.01, "miniBatchSize": 64, "costLimit": 0.01}},
        spec={"models.cost": {"function": {"file": "cost.py"}}},
    ),
    "online-dpo": ComparedAlgorithm({"onlineDpo": {"beta": 0.1, "miniBatchSize": 64}}, 0.1),
    "rlaif-direct": ComparedAlgorithm(
        {"grpo": GROUP},
        0.2,
        by_judge("{response}={record.answer}==", method="Direct", minimum=0, maximum=1),
        RIGHT,
        judged=True,
    ),
    "rlaif-pairwise": ComparedAlgorithm(
        {"grpo": {**GROUP, "groupSize": 4}},
        0.2,
        by_judge("{first}={second}={record.answer}=", method="Pairwise"),
        RIGHT,
        judged=True,
    ),
    "sft": ComparedAlgorithm({"sft": {"responseKey": "chosen", "miniBatchSize": 64}}, 0.3, of_pairs(), ""),
    "reward-model": ComparedAlgorithm(
        {"rewardModel": {"miniBatchSize": 64}},
        0.2,
        {**of_pairs(), "training.optimizer.learningRate": 1e-3},
        "training/reward/accuracy",
        "pairs ranked right",
    ),
    "dpo": ComparedAlgorithm(
        {"dpo": {"beta": 0.1, "miniBatchSize": 64}},
        0.2,
        {**of_pairs(), "inference": {"replicas": 1}},
        "training/actor/accuracy",
        "pairs ranked right",
    ),
}
"""Name in the table -> run. Whoever adds an algorithm adds its row."""

JUDGE_JOB: Final[Mapping[str, Any]] = {
    **of_pairs(),
    "algorithm": {"sft": {"responseKey": "response", "miniBatchSize": 128}},
    "iterations": 150,
    "prompts.path": "judgments.jsonl",
    "rollout": {"batchSize": 1024, "maxPromptTokens": 34, "maxResponseTokens": 2},
    "training": {
        "microBatchSize": 64,
        "optimizer": {"schedule": "Linear", "learningRate": 2e-3, "minLearningRateRatio": 0.1, "warmupSteps": 20},
    },
}
"""Path in the manifest -> value, of the job that teaches the judge."""


def judgments(pairs: Iterable[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Yield questions with the judge's right answer: whether a response is right (1, or 0), and which of two is (1 or
    2), each place as often. The judge is told the sum and has to compare, as a model of this size does not learn to
    add up and to compare at once. `pairs`: lines of the pipeline's file. Of the responses that are wrong every second
    one is no answer in form, or a judge would rate what it never saw by luck, and a policy would find out what it rates
    well.
    """
    rng = random.Random("judgments")
    for number, pair in enumerate(pairs):
        right, wrong = pair["chosen"], pair["rejected"]
        answer = right.rsplit("=", 1)[-1]
        if number % 2:
            wrong = without_form(rng, right)
        yield {"prompt": f"{right if number % 4 < 2 else wrong}={answer}==", "response": str(int(number % 4 < 2))}
        first, second = (right, wrong) if number % 8 < 4 else (wrong, right)
        yield {"prompt": f"{first}={second}={answer}=", "response": "1" if first == right else "2"}


def without_form(rng: random.Random, right: str) -> str:
    """Return what a policy may say that forgets the form of an answer: a part of the right one, that and more, or any
    characters."""
    text = "".join(rng.choice("0123456789+=") for _ in range(rng.randrange(LONGEST + 1)))
    said = rng.choice((right[: rng.randrange(len(right))], (right + text)[:LONGEST], text))
    return said if said != right else right[1:]
