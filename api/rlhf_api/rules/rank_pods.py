"""Rules of `spec.training.ranksPerPod`: it divides the number of ranks, and only pods of training have several."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.common_rules import number_of_ranks, ranks_in_cel, ranks_in_words
from rlhf_api.rules.rule import Rule, Values

_FIELD: Final = "spec.training.ranksPerPod"


def of_rank_pods() -> Iterator[Rule]:
    """Yield the rules of several ranks per pod."""
    yield Rule(
        field=_FIELD,
        node="spec.training",
        cel=f"{ranks_in_cel('self.parallelism')} % self.ranksPerPod == 0",
        holds=_divides,
        message=f"must divide the number of ranks, {ranks_in_words()}: use a divisor of it, or 1",
    )
    yield Rule(
        field=_FIELD,
        node="spec",
        cel="self.training.ranksPerPod == 1 || self.placement == 'Dedicated'",
        holds=lambda values: values[_FIELD] == 1 or values["spec.placement"] == "Dedicated",
        message="must be 1 with spec.placement Colocated, as ranks are in generation workers: use Dedicated, or 1",
    )


def _divides(values: Values) -> bool:
    return bool(number_of_ranks(values) % values[_FIELD] == 0)
