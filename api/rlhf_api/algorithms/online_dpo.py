"""Online direct preference optimisation: two responses are sampled, and the reward picks the better one."""

from collections.abc import Iterator
from typing import ClassVar

from rlhf_api.algorithms.dpo import PreferenceFields
from rlhf_api.algorithms.graph import GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR
from rlhf_api.rules.common_rules import drawn_at_random
from rlhf_api.rules.rule import Rule


class OnlineDPO(PreferenceFields):
    """Direct preference optimisation on the policy's own pairs: the response with the higher reward is chosen, the
    first on a tie."""

    summary: ClassVar = "Direct preference optimisation on two sampled responses, ranked by the reward; no critic."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR)

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        yield drawn_at_random(path, "the two responses of a pair")
