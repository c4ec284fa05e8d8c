"""The reward of docs/tutorials/your-reward.md, in a child process as in a job."""

from dataclasses import replace
from pathlib import Path

from tests.support.workers.reward_samples import sample

from rlhf_api.job.rewards import RewardFunction
from rlhf_workers.inference.rewards.function import FunctionReward

EXAMPLE = Path(__file__).parents[4] / "examples/your_reward/reward.py"


async def test_the_function_of_the_tutorial_scores_and_abstains() -> None:
    source = FunctionReward(RewardFunction(file=str(EXAMPLE)), 60, 1, 1, field="spec.models.reward")
    await source.start()
    try:
        asked = replace(sample("Red and green"), record='{"words": ["red", "blue"]}')
        assert (await source.score(asked)).reward == 0.5
        assert (await source.score(replace(asked, record="{}"))).reward is None
    finally:
        await source.close()
