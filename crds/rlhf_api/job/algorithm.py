"""`spec.algorithm`: which algorithm trains the policy, and its numbers. Exactly one member is set.

The shape of an algorithm (models, tasks, what waits for what) is data in `rlhf_api.algorithms`; here are its fields.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.job.base import LARGEST, ApiModel, PositiveOrOff

Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class PolicyFields(ApiModel):
    """Fields shared by the clipped policy-gradient algorithms."""

    kl_coefficient: NonNegative = 0.02
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio of new to old probability is clipped to [1 - clipRange, 1 + clipRangeHigh]."""
    clip_range_high: Positive | None = None
    """Upper clip range; clipRange when unset."""
    dual_clip: Annotated[float, Field(gt=1, le=LARGEST)] | None = None
    """Where the advantage is negative, the loss grows no further from this ratio on; 3 is usual, unset is off."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus in the policy loss."""
    epochs: Annotated[int, Field(ge=1, le=64)] = 1
    """Passes over the samples of an iteration."""
    mini_batch_size: Annotated[int, Field(ge=1, le=1048576)] = 64
    """Samples an optimizer step; must divide rollout.batchSize."""


class PPO(PolicyFields):
    """Proximal policy optimisation with a critic (generalised advantage estimation)."""

    kl_in: Literal["Reward", "Loss"] = "Reward"
    """Where the KL term goes: subtracted from each token's reward, or added to the policy loss."""
    kl_target: Positive | None = None
    """Adapts klCoefficient towards this KL (proportional controller), in nats a response as status.progress.kl is;
    unset keeps it fixed."""
    kl_horizon: Annotated[int, Field(ge=1, le=2147483647)] = 10000
    """Samples over which the adaptive coefficient moves."""
    value_clip_range: PositiveOrOff = 0.2
    """Values are clipped to old value +- this; 0 turns value clipping off."""
    gamma: Fraction = 1.0
    """Discount of future rewards, a token."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over the response tokens of the batch."""


class GRPO(PolicyFields):
    """Group relative policy optimisation: advantages from a group of responses to one prompt; no critic."""

    group_size: Annotated[int, Field(ge=2, le=65536)] = 8
    """Responses a prompt; must divide rollout.batchSize and algorithm.grpo.miniBatchSize."""
    advantage_scale: Literal["GroupStd", "None"] = "GroupStd"
    """Divide the group-centred reward by the group's standard deviation, or not."""
    loss_aggregation: Literal["SequenceMean", "TokenMean"] = "SequenceMean"
    """Average the loss over a sequence first and then over sequences, or over all tokens of a mini-batch."""


class Algorithm(ApiModel):
    """Exactly one of the members."""

    exactly_one: ClassVar = ("ppo", "grpo")

    ppo: PPO | None = None
    """Proximal policy optimisation, actor and critic."""
    grpo: GRPO | None = None
    """Group relative policy optimisation, no critic."""

    @property
    def name(self) -> str:
        """Key of the dataflow graph in `rlhf_api.algorithms`."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def fields(self) -> PPO | GRPO:
        """The one member that is set."""
        member = getattr(self, self.name)
        assert isinstance(member, PPO | GRPO)
        return member
