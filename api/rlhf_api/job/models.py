"""`spec.models`: where each model role comes from. A role that the algorithm's graph does not need is left out."""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_api.algorithms.graph import Task
from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_api.api_model import ApiModel
from rlhf_api.job.model_source import ModelSource
from rlhf_api.job.reward_headers import SecretKey
from rlhf_api.job.rewards import MAX_REWARDS, GivenReward, NamedReward, Reward


class Models(ApiModel):
    """The model roles of the job."""

    at_most_one: ClassVar = ("reward", "rewards")

    actor: ModelSource
    """The policy that is trained."""
    critic: ModelSource | None = None
    """The value model: a causal language model, whose value head starts at zero, or a reward model, whose head it
    keeps. Unset: it starts from the actor. Algorithms without a critic ignore it."""
    reference: ModelSource | None = None
    """The frozen model with which the KL term compares the actor. Unset: the actor's own model."""
    reward: Reward | None = None
    """Where rewards come from, if it is one place. Algorithms that ask for no reward ignore it."""
    rewards: Annotated[list[NamedReward], Field(min_length=1, max_length=MAX_REWARDS)] | None = None
    """Several rewards by name, in place of reward. spec.rewardShaping says how they are combined."""
    cost: Reward | None = None
    """What judges the harm of responses, as a reward judges their worth. Algorithms without a
    cost ignore it."""
    cost_critic: ModelSource | None = None
    """The value model of costs, as critic is that of rewards. Unset: it starts from the actor. Algorithms without a
    cost ignore it."""

    def given(self, role: ModelRole) -> ModelSource | None:
        """Return the model that the manifest gives for a role; None where it gives none, no model at all, or several
        (`rewards_of`)."""
        if role.kind is ModelKind.REWARD:
            given = self.rewards_of(role)
            return given[0].reward.own_model if len(given) == 1 else None
        source: ModelSource | None = getattr(self, role)
        return source

    def rewards_of(self, role: ModelRole) -> tuple[GivenReward, ...]:
        """Return the rewards that the manifest gives for a role that judges responses, in its order."""
        one: Reward | None = getattr(self, role, None)
        if one is not None:
            return (GivenReward(role.manifest_path, one, role),)
        several: list[NamedReward] = getattr(self, f"{role}s", None) or []
        places = enumerate(several)
        path = f"{role.manifest_path}s"
        return tuple(GivenReward(f"{path}[{i}]", each, role, each.name, each.weight) for i, each in places)

    def reward_of(self, task: Task) -> GivenReward:
        """Return the reward that a task of the job's graph asks for. KeyError when the manifest has none."""
        name = task.part.name if task.part else ""
        return {given.name: given for given in self.rewards_of(task.model)}[name]

    @property
    def all_rewards(self) -> tuple[GivenReward, ...]:
        """The rewards of every role that judges responses."""
        return tuple(given for role in ModelRole if role.kind is ModelKind.REWARD for given in self.rewards_of(role))

    def secret_keys(self) -> tuple[SecretKey, ...]:
        """Return the keys of Secrets that rewards are given."""
        return tuple(key for given in self.all_rewards for key in given.reward.secret_keys())

    def source(self, role: ModelRole) -> ModelSource | None:
        """Return the model that a role starts from: the actor's where none is given. None: user code is called."""
        given = self.given(role)
        calls = role.kind is ModelKind.REWARD and self.rewards_of(role)
        return given if given is not None or calls else self.actor

    def path_field(self, role: ModelRole) -> str:
        """Return the manifest path of the path of the model that a role starts from, for messages."""
        if role.kind is ModelKind.REWARD and (given := self.rewards_of(role)):
            return f"{given[0].field}.{given[0].reward.own_model_field}.path"
        chosen = role if self.given(role) is not None else ModelRole.ACTOR
        return f"{chosen.manifest_path}.path"
