"""Sources of rewards: `spec.models.reward`, or several by name in `spec.models.rewards`.

A source is a Python function, a model, an endpoint, a judge, or the environment of the rollout.
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
"""Maximum named rewards per job."""


class RewardFunction(ApiModel):
    """A Python function `name(prompt, response, record) -> float | None`, sync or async. None abstains; a sample
    without any reward is not trained on. Optional parameters are finish_reason and response_tokens. It may return a
    mapping with `reward` and `metrics`, numbers by name."""

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
    """Name of an importable module, instead of file."""
    config_map: Annotated[ConfigMapName, Field(examples=["my-reward"])] | None = None
    """Name of a ConfigMap with the function under the key reward.py, instead of file. Clusters only."""
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253, examples=["score"])] = "score"
    """Name of the function."""
    env: Annotated[list[CodeVariable], Field(max_length=64)] = Field(default_factory=list)
    """Environment variables of its processes, besides a few such as PATH and HOME."""


class RewardEndpoint(ApiModel):
    """An HTTP endpoint: POST {"samples": [{"prompt", "response", "record", "finish_reason", "response_tokens"}]} ->
    {"rewards": [float | null]}, optionally with "metrics": [{name: number}]."""

    url: Annotated[str, Field(pattern=r"^https?://[^/ ]+", max_length=2048, examples=["http://rewards:8000/score"])]
    """URL, http or https."""
    headers: Annotated[list[RewardHeader], Field(max_length=32)] = Field(default_factory=list)
    """Headers of every request."""


class Reward(ApiModel):
    """Source of rewards: exactly one of function, model, endpoint, judge, environment."""

    exactly_one: ClassVar = ("function", "model", "endpoint", "judge", "environment")

    function: RewardFunction | None = None
    """A Python function run by workers that score."""
    model: ModelSource | None = None
    """A sequence classification model with one output, run by workers that score."""
    endpoint: RewardEndpoint | None = None
    """An HTTP endpoint."""
    judge: Judge | None = None
    """A language model as judge."""
    environment: EnvironmentReward | None = None
    """The environment of the rollout."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """Seconds that one call may take. A slower call is retried, then onFailure applies; it never counts as zero."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Retries after the first failure."""
    on_failure: Literal["Fail", "Abstain"] = "Fail"
    """Reaction when all tries of a sample fail. Fail: the job fails. Abstain: the reward abstains and the job
    continues; the failure is counted and logged."""
    calls: Literal["Sample", "Batch", "Group"] = "Sample"
    """Input per call of a function or endpoint. Sample: one response. Batch: lists of up to batchSize waiting
    responses. Group: lists of all responses to one prompt."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """Most responses per call with calls Batch."""

    @property
    def kind(self) -> str:
        """Name of the member that is set: function, model, endpoint, judge or environment."""
        return next(name for name in self.exactly_one if getattr(self, name) is not None)

    @property
    def own_model(self) -> ModelSource | None:
        """The model that workers load for this reward; None if it has none."""
        return self.judge.model if self.judge else self.model

    @property
    def own_model_field(self) -> str:
        """Path of `own_model` within the reward."""
        return "judge.model" if self.judge else "model"

    @property
    def of_group(self) -> bool:
        """Whether one call judges all responses to a prompt."""
        return self.calls == "Group" or (self.judge is not None and self.judge.method == "Pairwise")

    @property
    def longest(self) -> int:
        """Maximum seconds of all tries of one call, without pauses and queueing."""
        return self.timeout_seconds * (self.retries + 1)

    def secret_keys(self) -> tuple[SecretKey, ...]:
        """Return the distinct keys of Secrets that the reward receives, in the order of the manifest."""
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
    """Name of the reward in metrics, sample tables and messages."""
    weight: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] = 1.0
    """Weight of the reward in the combination; negative to discourage it."""


@dataclass(frozen=True)
class GivenReward:
    """A reward of a manifest with its path there."""

    field: str
    """Manifest path, such as `spec.models.reward` or `spec.models.rewards[1]`."""
    reward: Reward
    role: ModelRole
    """Role of the reward; a cost is specified like a reward."""
    name: str = ""
    """Empty for a role with a single, unnamed reward."""
    weight: float = 1.0
