"""Where rewards come from: `spec.models.reward`, or several by name in `spec.models.rewards`.

A source is a Python function, a model, an endpoint, a judge, or the environment of the rollout. What several give is
brought together by `spec.rewardShaping`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rlhf_api.algorithms.roles import ModelRole
from rlhf_api.api_model import LARGEST, MODULE_PATTERN, NAME_PATTERN, ApiModel, Location
from rlhf_api.job.environment import ConfigMapName, EnvironmentReward
from rlhf_api.job.judge import Judge
from rlhf_api.job.model_source import ModelSource
from rlhf_api.job.reward_headers import CodeVariable, RewardHeader, SecretKey

MAX_REWARDS: Final = 8
"""Named rewards of a job: more models than fit beside a policy, and few enough to look at one by one."""


class RewardFunction(ApiModel):
    """A Python function `name(prompt, response, record) -> float | None`, sync or async. None abstains: the sample is
    not trained on. It may have the parameters finish_reason and response_tokens too, and may return a mapping with
    `reward` and `metrics`, numbers by name."""

    exactly_one: ClassVar = ("file", "module", "config_map")

    file: Location | None = None
    """Path of a Python file, relative to the manifest."""
    module: (
        Annotated[
            str,
            Field(
                pattern=MODULE_PATTERN,
                max_length=253,
                examples=["rewards.arithmetic"],
            ),
        ]
        | None
    ) = None
    """Name of an importable module, in place of file."""
    config_map: Annotated[ConfigMapName, Field(examples=["my-reward"])] | None = None
    """Name of a ConfigMap whose key reward.py holds the function, in place of file. In a cluster only."""
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253, examples=["score"])] = "score"
    """Name of the function."""
    env: Annotated[list[CodeVariable], Field(max_length=64)] = Field(default_factory=list)
    """Environment variables of the function's process. It gets no other variables but those that Python needs."""


class RewardEndpoint(ApiModel):
    """An HTTP endpoint: POST {"samples": [{"prompt", "response", "record", "finish_reason", "response_tokens"}]} ->
    {"rewards": [float | null]}, and if it likes "metrics": [{name: number}]."""

    url: Annotated[str, Field(pattern=r"^https?://[^/ ]+", max_length=2048, examples=["http://rewards:8000/score"])]
    """URL, http or https."""
    headers: Annotated[list[RewardHeader], Field(max_length=32)] = Field(default_factory=list)
    """Headers of every request."""


class Reward(ApiModel):
    """Where rewards come from: exactly one of function, model, endpoint, judge, environment."""

    exactly_one: ClassVar = ("function", "model", "endpoint", "judge", "environment")

    function: RewardFunction | None = None
    """A Python function run in inference workers."""
    model: ModelSource | None = None
    """A sequence classification model with one output, run in inference workers."""
    endpoint: RewardEndpoint | None = None
    """An HTTP endpoint."""
    judge: Judge | None = None
    """A language model that is asked for its judgment."""
    environment: EnvironmentReward | None = None
    """The environment that answers the turns of the policy."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """Seconds that one call may take. A slower one is retried and at last fails the job; it is never
    taken to be zero."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Tries after the first failure, before the job fails."""
    on_failure: Literal["Fail", "Abstain"] = "Fail"
    """What follows when all tries of a sample failed. Fail: the job fails. Abstain: the reward abstains, and the job
    goes on; the failure is counted and written down."""
    calls: Literal["Sample", "Batch", "Group"] = "Sample"
    """What a call of a function or an endpoint is given. Sample: one response. Batch: up to batchSize responses that
    wait, as lists. Group: all responses to one prompt, as lists."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """Responses of a call at most, with calls Batch."""

    @property
    def kind(self) -> str:
        """Name of the member that is set: function, model, endpoint, judge or environment."""
        return next(name for name in self.exactly_one if getattr(self, name) is not None)

    @property
    def own_model(self) -> ModelSource | None:
        """The model that inference workers run for it; None: it is called."""
        return self.judge.model if self.judge else self.model

    @property
    def own_model_field(self) -> str:
        """Path of `own_model` within the reward."""
        return "judge.model" if self.judge else "model"

    @property
    def of_group(self) -> bool:
        """Whether it judges all responses to a prompt together."""
        return self.calls == "Group" or (self.judge is not None and self.judge.method == "Pairwise")

    @property
    def longest(self) -> int:
        """Seconds that all tries of one sample may take."""
        return self.timeout_seconds * (self.retries + 1)

    def secret_keys(self) -> tuple[SecretKey, ...]:
        """Return the keys of Secrets that the reward is given, each once, in the order of the manifest."""
        asked = self.judge.endpoint if self.judge else None
        sources = (
            self.function.env if self.function else (),
            self.endpoint.headers if self.endpoint else (),
            asked.headers if asked else (),
        )
        members = [member for source in sources for member in source]
        return tuple(dict.fromkeys(member.secret_key_ref for member in members if member.secret_key_ref is not None))


class NamedReward(Reward):
    """One of several rewards."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=32, examples=["correct"])]
    """Name of the reward, in metrics, sample tables and messages."""
    weight: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] = 1.0
    """What it counts for where rewards are combined; negative for what is to become less."""


@dataclass(frozen=True)
class GivenReward:
    """A reward of a manifest, and where it stands there."""

    field: str
    """Manifest path, such as `spec.models.reward` or `spec.models.rewards[1]`."""
    reward: Reward
    role: ModelRole
    """What it judges by: a cost is given as a reward is."""
    name: str = ""
    """Empty for the only reward of its role."""
    weight: float = 1.0
