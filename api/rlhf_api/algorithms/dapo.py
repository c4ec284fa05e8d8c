"""DAPO, decoupled clip and dynamic sampling: fields and graph.

Source: Yu et al., "DAPO" (2025, arXiv 2503.14476). The limit of rounds and its consequences are this project's.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.algorithms.fields import NonNegative, Positive
from rlhf_api.algorithms.graph import GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR
from rlhf_api.algorithms.group_gradient_fields import GroupGradientFields, GroupSize
from rlhf_api.algorithms.refill import RefillRule, UsedUp
from rlhf_api.rules.rule import Rule


class DAPO(GroupGradientFields):
    """DAPO: GRPO whose defaults are a higher upper clip range, a mean over tokens, no divergence term, a penalty for
    long responses, and replacement of prompts without a learning signal."""

    summary: ClassVar = "DAPO: GRPO with decoupled clipping, dynamic sampling and overlong shaping, no critic."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR)
    advantages_by_group: ClassVar = True

    group_size: GroupSize = 16
    """Responses per prompt; must divide rollout.batchSize and algorithm.dapo.miniBatchSize."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    clip_range_high: Positive | None = 0.28
    """Upper clip range."""
    overlong_penalty: NonNegative = 1.0
    """Largest length penalty subtracted from a reward; 0: none."""
    overlong_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of rollout.maxResponseTokens, at its end, over which the penalty grows from 0 to overlongPenalty."""
    refill_rounds: Annotated[int, Field(ge=0, le=64)] = 10
    """Most rounds that replace prompts whose rewards before the penalty are all equal. Replacements are checked in the
    next round. 0 drops no prompt."""
    when_rounds_used_up: Literal["Mask", "Train", "Fail"] = "Mask"
    """Places of a batch that no round could fill. Mask: excluded from the losses. Train: dropped groups are trained on,
    and their tokens count in means. Fail: the job fails."""

    @property
    def refill(self) -> RefillRule:
        return RefillRule(self.refill_rounds, UsedUp(self.when_rounds_used_up))

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        below = path.replace("spec.", "self.", 1)
        yield Rule(
            field="spec.rewardShaping.overlongBuffer",
            node="spec",
            cel=f"!has({below}) || {below}.overlongPenalty == 0.0 || self.rewardShaping.overlongBuffer == 0",
            holds=lambda values: (
                not values.has(path)
                or not values[f"{path}.overlongPenalty"]
                or not values["spec.rewardShaping.overlongBuffer"]
            ),
            message=f"must be 0 while {path}.overlongPenalty is above 0, or a long response is punished twice: set one",
        )
        yield Rule(
            field="spec.rollout.oversample",
            node="spec",
            cel=f"!has({below}) || {below}.refillRounds == 0 || self.rollout.oversample == 0",
            holds=lambda values: (
                not values.has(path) or not values[f"{path}.refillRounds"] or not values["spec.rollout.oversample"]
            ),
            message=f"must be 0 while {path}.refillRounds is above 0, which fills the batch already: set one of them",
        )
        yield Rule(
            field="spec.rollout.longRounds",
            node="spec",
            cel=f"!has({below}) || {below}.refillRounds == 0 || self.rollout.longRounds != 'Auto'",
            holds=lambda values: (
                not values.has(path)
                or not values[f"{path}.refillRounds"]
                or values["spec.rollout.longRounds"] != "Auto"
            ),
            message=f"must not be Auto while {path}.refillRounds is above 0, which fills the batch already: set one",
        )
        yield Rule(
            field="spec.training.stream",
            node="spec",
            cel=f"!has({below}) || {below}.refillRounds == 0 || self.training.stream == 'Disabled'",
            holds=lambda values: (
                not values.has(path)
                or not values[f"{path}.refillRounds"]
                or values["spec.training.stream"] == "Disabled"
            ),
            message=f"must be Disabled while {path}.refillRounds is above 0, which may drop a complete group: set one",
        )
        yield Rule(
            field="spec.prompts.lengthWindow",
            node="spec",
            cel=f"!has({below}) || {below}.refillRounds == 0 || self.prompts.lengthWindow < 2",
            holds=lambda values: (
                not values.has(path) or not values[f"{path}.refillRounds"] or values["spec.prompts.lengthWindow"] < 2
            ),
            message=f"must be 0 while {path}.refillRounds is above 0: prompts that fill the batch have any length",
        )
