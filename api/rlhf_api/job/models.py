"""`spec.models`: the source of each model role. Roles that the algorithm's graph does not need may be left out, except
the actor."""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_api.algorithms.graph import Task
from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_api.api_model import ApiModel
from rlhf_api.job.model_source import ModelSource
from rlhf_api.job.reward_headers import SecretKey
from rlhf_api.job.rewards import MAX_REWARDS, GivenReward, NamedReward, Reward
from rlhf_common.names import DRAFT_MODEL, DRAFT_MODEL_FIELD


class Models(ApiModel):
    """The model roles of the job."""

    at_most_one: ClassVar = ("reward", "rewards")

    actor: ModelSource
    """The policy, trained by every algorithm but rewardModel."""
    critic: ModelSource | None = None
    """The value model: a causal language model, with a value head that starts at zero, or a reward model with its own
    head. Unset: it starts from the actor. Ignored by algorithms without a critic."""
    reference: ModelSource | None = None
    """The frozen model with which the actor is compared, as in the KL term. Unset: the model in the actor's folder."""
    reward: Reward | None = None
    """Single source of rewards, or the model that rewardModel trains. Ignored by other algorithms without a reward."""
    rewards: Annotated[list[NamedReward], Field(min_length=1, max_length=MAX_REWARDS)] | None = None
    """Several rewards by name, instead of reward. spec.rewardShaping combines them."""
    cost: Reward | None = None
    """Source of costs, the harm of responses. Ignored by algorithms without a cost."""
    cost_critic: ModelSource | None = None
    """The value model of costs, like critic for rewards. Unset: it starts from the actor. Ignored by algorithms without
    a cost."""

    def explicit_source(self, role: ModelRole) -> ModelSource | None:
        """Return the model that the manifest sets for a role; None if it sets none, a reward without its own model, or
        several rewards (`rewards_of`)."""
        if role.kind is ModelKind.REWARD:
            rewards = self.rewards_of(role)
            return rewards[0].reward.own_model if len(rewards) == 1 else None
        source: ModelSource | None = getattr(self, role)
        return source

    def rewards_of(self, role: ModelRole) -> tuple[GivenReward, ...]:
        """Return the rewards of a role that judges responses, in the order of the manifest."""
        reward: Reward | None = getattr(self, role, None)
        if reward is not None:
            return (GivenReward(role.manifest_path, reward, role),)
        several: list[NamedReward] = getattr(self, f"{role}s", None) or []
        places = enumerate(several)
        path = f"{role.manifest_path}s"
        return tuple(GivenReward(f"{path}[{i}]", each, role, each.name, each.weight) for i, each in places)

    def reward_of(self, task: Task) -> GivenReward:
        """Return the reward that a task of the job's graph needs. Raises KeyError if the manifest has none."""
        name = task.part.name if task.part else ""
        return {entry.name: entry for entry in self.rewards_of(task.model)}[name]

    @property
    def all_rewards(self) -> tuple[GivenReward, ...]:
        """The rewards of every role that judges responses."""
        return tuple(entry for role in ModelRole if role.kind is ModelKind.REWARD for entry in self.rewards_of(role))

    def secret_keys(self) -> tuple[SecretKey, ...]:
        """Return the keys of Secrets that rewards receive."""
        return tuple(key for entry in self.all_rewards for key in entry.reward.secret_keys())

    def source(self, role: ModelRole) -> ModelSource | None:
        """Return the model that a role starts from, by default the actor's. None if the role has rewards, unless it has
        a single one with its own model."""
        explicit = self.explicit_source(role)
        calls = role.kind is ModelKind.REWARD and self.rewards_of(role)
        return explicit if explicit is not None or calls else self.actor

    def path_field(self, model: str) -> str:
        """Return the manifest path of the folder that a role, or the draft model, starts from, for messages.

        Raises ValueError for other names.
        """
        if model == DRAFT_MODEL:
            return DRAFT_MODEL_FIELD
        role = ModelRole(model)
        if role.kind is ModelKind.REWARD and (entries := self.rewards_of(role)):
            return f"{entries[0].field}.{entries[0].reward.own_model_field}.path"
        chosen = role if self.explicit_source(role) is not None else ModelRole.ACTOR
        return f"{chosen.manifest_path}.path"
