"""Rules of `spec.prompts.lengthWindow`: other settings must not move prompts between its batches.

`absent_groups` has the rule that the algorithm generates, and the algorithms have those of their own fields.
"""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.rule import Rule, Values

FIELD: Final = "spec.prompts.lengthWindow"
NOT_SORTED: Final = "self.prompts.lengthWindow < 2"
"""CEL for a job without sorted windows."""


def of_length_window() -> Iterator[Rule]:
    """Yield the rules of sorted windows."""
    yield Rule(
        field=FIELD,
        node="spec",
        cel=f"{NOT_SORTED} || self.rollout.longRounds == 'Disabled'",
        holds=lambda values: not is_sorted(values) or values["spec.rollout.longRounds"] == "Disabled",
        message=(
            "needs spec.rollout.longRounds Disabled: batches of like lengths leave long rounds little to gain, and "
            "both decide which prompts share a batch: set one"
        ),
    )
    yield Rule(
        field=FIELD,
        node="spec",
        cel=f"{NOT_SORTED} || self.rollout.maxStaleness == 0",
        holds=lambda values: not is_sorted(values) or values["spec.rollout.maxStaleness"] == 0,
        message=(
            "needs spec.rollout.maxStaleness 0: a carried prompt takes a place in the next batch, whose prompts have "
            "other lengths: set one"
        ),
    )


def is_sorted(values: Values) -> bool:
    """Return whether a job has sorted windows."""
    return bool(values[FIELD] > 1)
