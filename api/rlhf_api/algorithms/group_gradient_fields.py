"""Fields and rules of policy gradients with a group of responses per prompt, and no critic."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rlhf_api.algorithms.fields import PolicyGradientFields
from rlhf_api.rules.common_rules import drawn_at_random, multiple
from rlhf_api.rules.rule import Rule

GroupSize = Annotated[int, Field(ge=2, le=65536)]


class GroupGradientFields(PolicyGradientFields):
    """Fields of policy gradients over groups of responses."""

    group_size: GroupSize = 8
    """Responses per prompt; must divide rollout.batchSize and the algorithm's miniBatchSize."""

    @property
    def responses_per_prompt(self) -> int:
        return self.group_size

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield multiple("spec.rollout.batchSize", f"{path}.groupSize", of=path)
        yield multiple(f"{path}.miniBatchSize", f"{path}.groupSize", of=path)
        yield drawn_at_random(path, "all responses of a group")
