"""Rules of `spec.training.parallelism.expert`, ranks out of data x context that divide experts."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.rules.common_rules import COPIES, number_of_ranks, ranks_in_cel, ranks_in_words
from rlhf_api.rules.rule import Rule, Values
from rlhf_api.rules.sharding import NO_DRAFT_TRAINED, trains_no_draft

_PARALLELISM: Final = "spec.training.parallelism"
_FIELD: Final = f"{_PARALLELISM}.expert"


def of_experts() -> Iterator[Rule]:
    """Yield the rules of expert parallel ranks."""
    yield Rule(
        field=_FIELD,
        node=_PARALLELISM,
        cel=(
            f"{ranks_in_cel('self', COPIES)} % self.expert == 0 && (self.expert == 1 || self.shard == 1 &&"
            " self.tensor == 1 && !self.shardOptimizer)"
        ),
        holds=lambda values: _divides(values) and _alone(values),
        message=(
            f"must divide {ranks_in_words(COPIES)}, and be 1 with shard or tensor above 1 or shardOptimizer: use a"
            " divisor, or 1"
        ),
    )
    yield Rule(
        field=_FIELD,
        node="spec",
        cel=(
            "self.training.parallelism.expert == 1 || self.placement == 'Dedicated'"
            f" && !has(self.training.lora) && ({NO_DRAFT_TRAINED})"
        ),
        holds=lambda values: _whole(values) or _may_share(values),
        message="must be 1 unless placement is Dedicated, lora is unset and no draftModel is trained",
    )


def _may_share(values: Values) -> bool:
    settled = values["spec.placement"] == "Dedicated" and not values.has("spec.training.lora")
    return settled and trains_no_draft(values)


def _divides(values: Values) -> bool:
    return bool(number_of_ranks(values, COPIES) % values[_FIELD] == 0)


def _alone(values: Values) -> bool:
    shared_otherwise = max(values[f"{_PARALLELISM}.shard"], values[f"{_PARALLELISM}.tensor"]) > 1
    return _whole(values) or not (shared_otherwise or values[f"{_PARALLELISM}.shardOptimizer"])


def _whole(values: Values) -> bool:
    return bool(values[_FIELD] == 1)
