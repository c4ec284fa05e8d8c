"""Training of a reward model on pairs of responses: fields and graph. Its loss is the module of the same name in
`rlhf_workers.algorithms`."""

from collections.abc import Iterator
from typing import ClassVar

from rlhf_api.algorithms.fields import NonNegative
from rlhf_api.algorithms.graph import TRAIN_REWARD
from rlhf_api.algorithms.pairs import FilePairFields
from rlhf_api.rules.rule import Rule, Values


class RewardModel(FilePairFields):
    """A reward model learns to score the better of two responses higher. It starts from models.reward.model, or else
    from models.actor. Its checkpoints are valid folders for models.reward.model.path."""

    summary: ClassVar = "Training of a reward model on pairs of responses of the prompt file; nothing is generated."
    all_tasks: ClassVar = (TRAIN_REWARD,)

    margin: NonNegative = 0.0
    """Margin subtracted from the better response's score in the loss, so that pairs move further apart."""
    centering_coefficient: NonNegative = 0.0
    """Weight of the squared sum of the two scores, which keeps scores around zero; 0.01 is usual."""

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        field, below = "spec.models.reward", path.replace("spec.", "self.", 1)

        def holds(values: Values) -> bool:
            return not values.has(path) or (not values.has(f"{field}s") and _starts_from_a_model(values, field))

        yield Rule(
            field=field,
            node="spec",
            cel=f"!has({below}) || (!has(self.models.rewards) && (!has(self.models.reward) || "
            "has(self.models.reward.model)))",
            holds=holds,
            message="is the model that rewardModel trains: set model, or remove it to start from the actor",
        )


def _starts_from_a_model(values: Values, field: str) -> bool:
    return not values.has(field) or values.has(f"{field}.model")
