"""The model roles of a job, each with its kind: what a model says of a response. Their sources are `spec.models`."""

from enum import StrEnum


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

    kind: ModelKind

    ACTOR = "actor", ModelKind.POLICY
    """The policy that generates and is trained."""
    CRITIC = "critic", ModelKind.VALUE
    """The value model."""
    REFERENCE = "reference", ModelKind.POLICY
    """The frozen policy that the trained one is compared with."""
    REWARD = "reward", ModelKind.REWARD
    """What judges responses."""

    def __new__(cls, name: str, kind: ModelKind) -> "ModelRole":
        member = str.__new__(cls, name)
        member._value_ = name
        member.kind = kind
        return member

    @property
    def manifest_path(self) -> str:
        """Manifest path of what the role comes from, such as `spec.models.actor`."""
        return f"spec.models.{self.value}"
