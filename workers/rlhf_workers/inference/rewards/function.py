"""Rewards from a user's Python function, run in child processes (`user_code.user_processes`).

Rule: a call that exceeds its time-out fails, and gives no zero reward.
"""

from collections.abc import Sequence

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rewards import GivenReward, RewardFunction
from rlhf_common.samples import ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.rewards.reward_settings import reward_settings
from rlhf_workers.inference.rewards.reward_source import Judgment, RewardError, described, judgment
from rlhf_workers.user_code.code_settings import NO_SETTINGS, CodeSettings
from rlhf_workers.user_code.user_process import UserCode, UserProcess
from rlhf_workers.user_code.user_processes import CHILDREN, UserProcesses


def load_reward(entry: GivenReward, spec: RLHFJobSpec, device: torch.device, home: torch.device) -> "FunctionReward":
    """Return the source of a reward's `function`; it needs no device."""
    function, threads = entry.reward.function, spec.inference.cpu_threads
    assert function is not None
    env = f"{entry.field}.function.env"
    settings = reward_settings(function.env, env, spec)
    return FunctionReward(function, entry.reward.timeout_seconds, threads, settings=settings, field=entry.field)


class FunctionReward(UserProcesses):
    """A RewardSource over child processes."""

    def __init__(
        self,
        function: RewardFunction,
        timeout_seconds: float,
        threads: int,
        children: int = CHILDREN,
        settings: CodeSettings = NO_SETTINGS,
        *,
        field: str,
    ) -> None:
        """`settings`: variables of the child process. `field`: manifest field of the reward."""
        code = function_code(function, threads, settings, field=f"{field}.function")
        super().__init__(code, timeout_seconds, f"{field}.timeoutSeconds", children)

    async def score(self, sample: ScoringSample) -> Judgment:
        """Return the reward of one sample."""
        return (await self._judge([sample], many=False))[0]

    async def score_group(self, samples: Sequence[ScoringSample]) -> list[Judgment]:
        """Return the rewards of several samples, from one call with lists."""
        return await self._judge(samples, many=True)

    async def _judge(self, samples: Sequence[ScoringSample], *, many: bool) -> list[Judgment]:
        request = {"many": many, "samples": [described(sample) for sample in samples]}

        async def judge(child: UserProcess) -> list[Judgment]:
            reply = await child.ask(request)
            field = self._code.manifest_field
            judged = [judgment(each["reward"], each["metrics"], field) for each in reply["rewards"]]
            if len(judged) != len(samples):
                raise RewardError("RewardInvalid", f"{len(judged)} rewards for {len(samples)} responses", field)
            return judged

        return await self.run(judge)


def function_code(
    function: RewardFunction, threads: int, settings: CodeSettings = NO_SETTINGS, *, field: str
) -> UserCode:
    """Return the code that a child runs for a function; WorkError for an unmounted ConfigMap."""
    return UserCode(
        "rlhf_workers.inference.rewards.function_host",
        "function",
        "Reward",
        "RewardFunctionInvalid",
        _arguments(function, field),
        field,
        threads,
        settings.values,
        settings.secret,
    )


def _arguments(function: RewardFunction, path: str) -> tuple[str, ...]:
    if function.file:
        return ("--file", function.file, "--name", function.name)
    if function.module:
        return ("--module", function.module, "--name", function.name)
    field = f"{path}.configMap"
    message = f"{field}: {function.config_map!r} is not mounted; a resolved job names the mounted file instead"
    raise WorkError("RewardFunctionInvalid", message, field=field)
