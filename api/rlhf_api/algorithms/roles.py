"""The model roles of a job, each with its kind, which defines a model's output. `spec.models` has their sources."""

from enum import StrEnum
from typing import Final

from pydantic.alias_generators import to_camel


class ModelKind(StrEnum):
    """Output of a model, which determines its head and its scorer."""

    POLICY = "policy"
    """Log-probabilities of tokens: a causal language model."""
    VALUE = "value"
    """One number per token: a language model with a value head."""
    REWARD = "reward"
    """One number per response: a sequence classification model, or another source of rewards."""


class ModelRole(StrEnum):
    """A model's function in an algorithm. Members are strings, the names in messages."""

    ACTOR = "actor"
    """The policy, which generates in jobs with generation."""
    CRITIC = "critic"
    """The value model."""
    REFERENCE = "reference"
    """The frozen policy with which the trained one is compared."""
    REWARD = "reward"
    """The judge of responses."""
    COST = "cost"
    """The judge of harm in responses."""
    COST_CRITIC = "cost_critic"
    """The value model of costs."""

    @property
    def kind(self) -> ModelKind:
        """Output of a model in this role."""
        return _KINDS[self]

    @property
    def manifest_name(self) -> str:
        """Name of the role in `spec.models`."""
        return to_camel(self.value)

    @property
    def manifest_path(self) -> str:
        """Manifest path of the role's source, such as `spec.models.actor`."""
        return f"spec.models.{self.manifest_name}"


_KINDS: Final = {
    ModelRole.ACTOR: ModelKind.POLICY,
    ModelRole.CRITIC: ModelKind.VALUE,
    ModelRole.REFERENCE: ModelKind.POLICY,
    ModelRole.REWARD: ModelKind.REWARD,
    ModelRole.COST: ModelKind.REWARD,
    ModelRole.COST_CRITIC: ModelKind.VALUE,
}
