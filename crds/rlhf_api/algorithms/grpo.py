"""Group relative policy optimisation: fields and graph. Its losses are `rlhf_workers.algorithms.grpo`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.algorithms.fields import PolicyGradientFields
from rlhf_api.algorithms.graph import GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR
from rlhf_api.rules.common_rules import multiple
from rlhf_api.rules.rule import Rule


class GRPO(PolicyGradientFields):
    """Group relative policy optimisation: advantages from a group of responses to one prompt; no critic."""

    summary: ClassVar = "Group relative policy optimisation, no critic."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR)

    group_size: Annotated[int, Field(ge=2, le=65536)] = 8
    """Responses per prompt; must divide rollout.batchSize and algorithm.grpo.miniBatchSize."""
    advantage_scale: Literal["GroupStd", "None"] = "GroupStd"
    """Divide the group-centred reward by the group's standard deviation, or not."""
    loss_aggregation: Literal["SequenceMean", "TokenMean"] = "SequenceMean"
    """Average the loss over a sequence first and then over sequences, or over all tokens of a mini-batch."""

    @property
    def responses_per_prompt(self) -> int:
        return self.group_size

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield multiple("spec.rollout.batchSize", f"{path}.groupSize", of=path)
        yield multiple(f"{path}.miniBatchSize", f"{path}.groupSize", of=path)
        yield Rule(
            field="spec.rollout.temperature",
            node="spec",
            cel=f"!has({path.replace('spec.', 'self.', 1)}) || self.rollout.temperature > 0.0",
            holds=lambda values: not values.has(path) or values["spec.rollout.temperature"] > 0,
            message="must be above 0 with algorithm grpo, or all responses of a group are the same: use 1.0",
        )
