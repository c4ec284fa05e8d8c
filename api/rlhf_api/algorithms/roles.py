"""The model roles of a job, each with its kind: what a model says of a response. Their sources are `spec.models`."""

from enum import StrEnum
from typing import Final

from pydantic.alias_generators import to_camel


class ModelKind(StrEnum):
    """What a model computes, and hence which head it has and which scorer runs it."""

    POLICY = "policy"
    """Log-probabilities of tokens: a causal language model."""
    VALUE = "value"
    """One number per token: a language model with a value head."""
    REWARD = "reward"
    """One number per response: a sequence classification model, or user code that is called."""


class ModelRole(StrEnum):
    """A model's part in an algorithm. Members are strings, the names that manifest and wire use."""

    ACTOR = "actor"
    """The policy that generates and is trained."""
    CRITIC = "critic"
    """The value model."""
    REFERENCE = "reference"
    """The frozen policy that the trained one is compared with."""
    REWARD = "reward"
    """What judges responses."""
    COST = "cost"
    """What judges the harm of responses."""
    COST_CRITIC = "cost_critic"
    """The value model of costs."""

    @property
    def kind(self) -> ModelKind:
        """What a model in this role computes."""
        return _KINDS[self]

    @property
    def manifest_name(self) -> str:
        """Name of the role in `spec.models`."""
        return to_camel(self.value)

    @property
    def manifest_path(self) -> str:
        """Manifest path of what the role comes from, such as `spec.models.actor`."""
        return f"spec.models.{self.manifest_name}"


_KINDS: Final = {
    ModelRole.ACTOR: ModelKind.POLICY,
    ModelRole.CRITIC: ModelKind.VALUE,
    ModelRole.REFERENCE: ModelKind.POLICY,
    ModelRole.REWARD: ModelKind.REWARD,
    ModelRole.COST: ModelKind.REWARD,
    ModelRole.COST_CRITIC: ModelKind.VALUE,
}
